"""What is read of a step's program once it is traced."""
