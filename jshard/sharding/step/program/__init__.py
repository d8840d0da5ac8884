"""A step's program: how it and a new state are made, checked once traced, and begun."""
