"""What a parameter is outside of its unit: a shard, or its gathered value."""
