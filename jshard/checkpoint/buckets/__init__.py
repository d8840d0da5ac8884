"""Runs in buckets (``gs://``, ``s3://``): their objects, arrays, saves and local copy."""
