"""Lines of the user in programs, and primitives of our own."""
