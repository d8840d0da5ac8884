"""What only CPUs need: the order and the pace of collectives."""
