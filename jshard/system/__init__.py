"""What a program needs around it, ``compat/`` included."""
