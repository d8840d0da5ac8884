"""What a program needs around it: errors, options, files, processes, and compat/."""
