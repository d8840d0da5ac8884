"""What is said: mesh, Policy, Precision, Loss, and TrainState."""
