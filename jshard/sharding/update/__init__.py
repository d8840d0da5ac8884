"""The update on exact global views. Its public face is ``jshard.optim``."""
