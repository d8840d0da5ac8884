"""Numbers in one byte or less, and products of them."""
