"""How an optimizer treats the layers of a Stack: what is known by name, what is asked."""
