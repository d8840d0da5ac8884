"""What the commands share: arguments, errors of one line, exit codes."""
