"""What a config leaves to the memory and the traffic of the devices."""
