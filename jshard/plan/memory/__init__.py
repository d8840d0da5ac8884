"""What a step needs of a device's memory."""
