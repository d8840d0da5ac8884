"""A recipe: one Python file, its functions, and what they make on a mesh."""
