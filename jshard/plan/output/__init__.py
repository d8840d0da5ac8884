"""A plan as text, JSON, a trace, and a page."""
