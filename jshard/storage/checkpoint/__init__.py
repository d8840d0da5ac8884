"""Sharded checkpoints: saved atomically, verified, and restored onto any mesh."""
