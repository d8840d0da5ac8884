"""The order and the pace of collectives on CPUs."""
