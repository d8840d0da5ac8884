"""What ``benchmarks/gpu.py`` measures, a file a stage; docs/gpu.md explains it."""
