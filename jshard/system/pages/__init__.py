"""Pages of one file, their charts and their pictures."""
