"""Checkpoints that Orbax wrote without jshard: what a folder is, and what is where."""
