"""What is said: the mesh, the policy, precisions, the loss, and the state."""
