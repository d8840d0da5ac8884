"""The update on global views: per-layer optimizers, averages, offloaded states."""
