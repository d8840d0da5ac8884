"""How an optimizer treats the layers of a Stack: found by asking it."""
