"""What a model imports: losses, cross entropy, attention, dropout."""
