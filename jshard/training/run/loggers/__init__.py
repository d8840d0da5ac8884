"""Services that a run logs to, besides its own folder; each is optional."""
