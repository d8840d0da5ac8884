"""The update on exact global views; its public face is ``jshard.optim``."""
