"""State layout: placements, partition specs, memory kinds and initial values."""
