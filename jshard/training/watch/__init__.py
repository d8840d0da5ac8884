"""Whether devices compute and keep what they should (`watch.replay`, `.replicas`)."""
