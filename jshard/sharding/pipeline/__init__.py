"""The stages of a Stack, and their schedule."""
