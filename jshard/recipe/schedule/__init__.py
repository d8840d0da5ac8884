"""How long a run is, in steps and epochs, its learning rates, and what it skips."""
