"""What depends on the version of JAX, Flax, Orbax or XLA, or is private to them."""
