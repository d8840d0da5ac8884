"""How an optimizer treats the layers of a Stack: by its name, or when asked."""
