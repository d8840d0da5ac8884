"""The keys that every recipe shares, by dotted name: defaults, help lines, ranges."""

from jshard.recipe.config.settings import RunSettings
from jshard.sharding.settings.policy import BY_MEMORY, Policy
from jshard.system.cli.knob import Knob, knobs

FITTED = tuple(f"policy.{name}" for name in BY_MEMORY)  # these can be "fit"


def _shared() -> dict[str, Knob]:
    declared = knobs(RunSettings)
    policy = knobs(Policy, "policy.") | {key: declared[key] for key in FITTED}
    found: dict[str, Knob] = {}
    for key, knob in declared.items():
        found |= policy if key in FITTED else {key: knob}
    return found


SHARED = _shared()
# Keys that every recipe must set; the defaults here are never used.
REQUIRED = {key: SHARED[key] for key in ("steps", "batch_size")}
# Keys that a recipe may leave at their defaults.
DEFAULTS = {key: knob for key, knob in SHARED.items() if key not in REQUIRED}

# What these keys mean if a recipe has them as plain numbers.
COMMON = {
    "optimizer.learning_rate": Knob(
        0.0, "peak of the learning rate schedule", at_least=0, at_most=1000
    ),
    "optimizer.warmup_steps": Knob(0, "steps of linear warm-up", at_least=0),
    "optimizer.weight_decay": Knob(
        0.0, "weight decay, multiplied by the learning rate", at_least=0, at_most=1000
    ),
    "optimizer.clip_norm": Knob(1.0, "global norm to clip gradients to", above=0),
    "optimizer.momentum": Knob(0.0, "decay of the momentum", at_least=0, below=1),
    "optimizer.b1": Knob(0.0, "decay of the first moment", at_least=0, below=1),
    "optimizer.b2": Knob(0.0, "decay of the second moment", at_least=0, below=1),
    "optimizer.eps": Knob(
        0.0, "term added to the root of the second moment", at_least=0, at_most=1
    ),
}  # fmt: skip
