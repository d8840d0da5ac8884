"""Where every array of a state lives: placements, specs, memory kinds, first values."""
