"""The axes "context", "tensor" and "expert": exchanges, and what models declare."""
