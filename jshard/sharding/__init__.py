"""The library: from a mesh and a policy to states and steps."""
