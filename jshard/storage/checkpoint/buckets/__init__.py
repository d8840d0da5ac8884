"""Runs in buckets (``gs://``, ``s3://``): objects, arrays, saves, local copy."""
