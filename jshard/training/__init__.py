"""Training runs: the recipe, its data, the step loop, metrics and the report."""
