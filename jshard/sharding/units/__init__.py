"""The algorithm: gather, compute, drop; gather again, transpose, reduce-scatter."""
