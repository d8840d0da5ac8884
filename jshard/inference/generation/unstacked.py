"""A Stack's layers side by side, for decoding.

A scan over stacked weights copies each layer's weights out of the stack, and reads and
writes of weights are what decoding a token takes. Layers with arrays of their own are
read once: on CPUs a step takes two thirds of the time.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jshard.sharding.units.modules import Stack, make_plain
from jshard.sharding.units.stack import split_aux


class Layers(nnx.Module):
    """Does what a Stack does outside a jshard step, layer after layer.

    Args:
      stack: its weights are copied.
    """

    def __init__(self, stack: Stack):
        graphdef, state = nnx.split(stack)
        count = jax.tree.leaves(state)[0].shape[0]

        def layer(i: int) -> nnx.Module:
            module = nnx.merge(graphdef, jax.tree.map(lambda x: x[i], state))
            make_plain(module)
            return module

        self.layers = nnx.List(map(layer, range(count)))

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the last layer's output, or (output, stacked aux)."""
        auxes, has_aux = [], False
        for layer in self.layers:
            x, aux, has_aux = split_aux(layer(x, *args, **kwargs), x)
            auxes.append(aux)
        if not has_aux:
            return x
        return x, jax.tree.map(lambda *parts: jnp.stack(parts), *auxes)


def without_stacks(model: nnx.Module) -> nnx.Module:
    """Returns a copy of a model whose modules have Layers in place of Stacks.

    Other arrays are shared with the model. A Stack in a list or a dict stays.
    """
    model = nnx.merge(*nnx.split(model))
    for _, module in list(nnx.iter_modules(model)):
        for name, value in list(vars(module).items()):
            if isinstance(value, Stack):
                setattr(module, name, Layers(value))
    return model
