"""What the commands share: arguments, one-line errors, exit codes."""
