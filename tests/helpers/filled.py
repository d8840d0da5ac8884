"""Models whose values NumPy draws: JAX would compile programs to draw them.

That takes longer than most tests, above all for a Stack.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def filled(
    make: Callable[[], Any], spread: float = 0.3, kinds: tuple[type, ...] = (nnx.Param,)
) -> Any:
    """Makes a model whose parameters are all random: scales around 1, others around 0.

    Its streams of random numbers have keys of their own; what else it has is 0. Arrays
    are NumPy's: of JAX's, each shape would compile a slice for the shards.

    Args:
      make: makes the model.
      spread: how far the values are from 1 and 0.
      kinds: the variables that are parameters.
    """
    model = nnx.eval_shape(make)
    rng = np.random.default_rng(0)
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        like = variable.get_value()
        if isinstance(variable, kinds):
            values = (path[-1] == "scale") + spread * rng.standard_normal(like.shape)
            variable.set_value(np.asarray(values, like.dtype))
        elif jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
            data = rng.integers(2**32, size=(*like.shape, 2), dtype=np.uint32)
            variable.set_value(jax.random.wrap_key_data(jax.device_put(data)))
        else:
            variable.set_value(np.zeros(like.shape, like.dtype))
    return model
