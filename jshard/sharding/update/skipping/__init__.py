"""When a step makes no update: gradients that overflow, and spikes."""
