"""Programs: what they depend on, lines of the user, primitives of our own."""
