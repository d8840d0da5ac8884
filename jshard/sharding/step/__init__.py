"""``FSDP``, and one device's program."""
