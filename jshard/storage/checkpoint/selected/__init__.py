"""Which checkpoint of a run is meant: by its address, and by its metric."""
