"""Copies of a run's state in the memory of its hosts, from which a job restarts."""

from jshard.storage.checkpoint.local.local_copies import Copy, Found, LocalCopies

__all__ = ["Copy", "Found", "LocalCopies"]
