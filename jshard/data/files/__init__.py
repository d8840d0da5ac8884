"""Files as they are found: which are read, what they are taken for, what is said."""
