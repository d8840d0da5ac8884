"""Recipes that come with jshard: one Python file each."""
