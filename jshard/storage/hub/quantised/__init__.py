"""Folders whose weights are quantised, and how their files keep these."""
