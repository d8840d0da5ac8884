"""What the axes "context", "tensor" and "expert" exchange."""
