"""FSDP: a mesh and a policy, and the states and steps that they make."""
