"""What a compiled step moves, and how long it takes."""
