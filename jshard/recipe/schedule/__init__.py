"""How long a run is, in steps and epochs, and its learning rates."""
