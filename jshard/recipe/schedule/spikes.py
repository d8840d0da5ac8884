"""The keys of ``jshard.optim.skip_spikes``, and the optimizer that they say."""

from typing import Any

from ml_collections import ConfigDict

from jshard.recipe.config.keys import Key
from jshard.sharding.update.skipping.skip_spikes import skip_spikes


def spike_keys() -> dict[str, Key]:
    """Returns the keys of `skipping`, for a group "optimizer"."""
    return {
        "skip_spikes": Key(
            0.0,
            "skip steps whose loss or gradient norm is this many standard deviations, "
            "6 say, above the mean of the last accepted steps; 0 skips none",
            at_least=0,
        ),
        "spike_window": Key(
            128,
            "accepted steps that skip_spikes compares with; before there are as many, "
            "only steps that are not finite are skipped",
            at_least=2,
            at_most=1_000_000,
        ),
    }


def skipping(optimizer: Any, config: ConfigDict) -> Any:
    """Returns an optimizer in `jshard.optim.skip_spikes`, if the config says so."""
    k, window = config.optimizer.skip_spikes, config.optimizer.spike_window
    return skip_spikes(optimizer, k, window) if k else optimizer
