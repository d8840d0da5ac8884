"""The values of arrays: new ones, random streams, copies from and to the host."""
