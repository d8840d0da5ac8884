"""What a step's trace may end with that is a user's mistake, each in one line."""

import re
from typing import NoReturn

from flax.errors import TraceContextError

from jshard.sharding.settings.mesh import manual_axes
from jshard.sharding.units.linearize import refuse_forward_mode
from jshard.system.compat.programs import lines
from jshard.system.errors import UserError

RAISED = (NotImplementedError, TypeError, NameError, ValueError, TraceContextError)
_AXIS = re.compile(r"unbound axis name: (\w+)")
_NO_RNGS = ("no `rngs` argument was provided", "'rngs' must be provided to __call__")


def say(error: Exception) -> NoReturn:
    """Raises a UserError that says what an error of ``RAISED`` means, or the error."""
    line, text = lines.line_of_error(error), str(error)
    if isinstance(error, UserError):
        raise error
    if isinstance(error, (NotImplementedError, TypeError, ValueError)) and (
        lines.is_of_sharding(error)
    ):
        raise UserError(
            f"{line}: a value is given a sharding (out_sharding=, reshard or a "
            "constraint) in a step, where each device computes with its own examples; "
            f"leave that out (JAX: {text.partition('. ')[0]})"
        ) from error
    if isinstance(error, (NotImplementedError, TypeError)):
        if lines.is_of_forward_mode(error):
            refuse_forward_mode(line)
    elif isinstance(error, NameError) and (axis := _AXIS.search(text)):
        axes = ", ".join(map(repr, manual_axes()))
        raise UserError(
            f"{line}: a collective is over {axis[1]!r}, which is not an axis of the "
            f"mesh ({axes}); leave it out where it averages a loss, metrics or "
            "gradients: the step adds up what Means hold; statistics of the whole "
            "batch are jshard.pmean(x)"
        ) from error
    elif isinstance(error, TraceContextError) and "mutate Rng" in text:
        raise UserError(
            f"{line}: the step draws from an nnx.Rngs that was made outside of it; let "
            "the loss take rngs (def loss_fn(model, batch, rngs)), which each step "
            "fills with new ones, or make them in the model, as nnx.Dropout(rate, "
            "rngs=rngs) does"
        ) from error
    elif isinstance(error, ValueError) and any(x in text for x in _NO_RNGS):
        raise UserError(
            f"{line}: dropout has no rngs: none were given to the layer when it was "
            "made, or to this call; let the loss take rngs (def loss_fn(model, batch, "
            "rngs)), which the step fills, and pass them on, or make the layer with "
            "jshard.Dropout(rate, rngs=rngs)"
        ) from error
    raise error
