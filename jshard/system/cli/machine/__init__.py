"""What a command finds on its machine: devices, memory limits, remarks of libraries."""
