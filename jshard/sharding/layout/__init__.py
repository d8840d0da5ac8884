"""Where every array lives: placements, memory kinds, values."""
