"""The layers of the models, with the initial values of GPT-2 and the model's dtypes."""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jshard

# Of a model: with width, num_layers, dtype (of the computation) and param_dtype.
Config = Any


def check(fits: bool, problem: str) -> None:
    """Raises a UserError, "model: PROBLEM", if something of a config does not fit."""
    if not fits:
        raise jshard.UserError(f"model: {problem}")


def check_heads(config: Config) -> None:
    """Raises a UserError unless the heads divide the width."""
    check(
        config.width % config.num_heads == 0,
        f"width={config.width} is not divisible by num_heads={config.num_heads}",
    )


def check_known(name: str, value: str, known: Collection[str]) -> None:
    """Raises a UserError unless a value is one of those known."""
    check(value in known, f"{name}={value!r} is unknown: use {', '.join(known)}")


def options(config: Config, rngs: nnx.Rngs) -> dict[str, Any]:
    """Returns what each of Flax's layers is made with: dtypes and random streams."""
    return {"dtype": config.dtype, "param_dtype": config.param_dtype, "rngs": rngs}


def linear(
    config: Config,
    size_in: int,
    size_out: int,
    rngs: nnx.Rngs,
    std: float = 0.02,
    *,
    bias: bool = True,
    init: nnx.Initializer | None = None,
) -> nnx.Linear:
    """Returns a linear layer; its weights are normal, unless ``init`` makes them."""
    return nnx.Linear(
        size_in,
        size_out,
        use_bias=bias,
        kernel_init=init or nnx.initializers.normal(std),
        **options(config, rngs),
    )


def residual_std(config: Config) -> float:
    """Returns the deviation of layers that end a residual branch (GPT-2, section 2.3).

    There are two branches a block.
    """
    return 0.02 / (2 * config.num_layers) ** 0.5


def embedding(
    config: Config,
    size: int,
    rngs: nnx.Rngs,
    std: float = 0.02,
    *,
    width: int | None = None,
) -> nnx.Embed:
    """Returns a table of ``size`` normal vectors, of the model's width by default."""
    return nnx.Embed(
        size,
        width or config.width,
        embedding_init=nnx.initializers.normal(std),
        **options(config, rngs),
    )


def layer_norm(
    config: Config, rngs: nnx.Rngs, epsilon: float = 1e-5, **more: Any
) -> nnx.LayerNorm:
    """Returns a norm of the residual stream with scale and bias."""
    return nnx.LayerNorm(config.width, epsilon=epsilon, **more, **options(config, rngs))


def rms_norm(
    config: Config, features: int, rngs: nnx.Rngs, *, epsilon: float, offset: bool
) -> nnx.RMSNorm:
    """Returns a norm without mean and bias; with ``offset`` it scales by 1 + scale."""
    more = options(config, rngs)
    if offset:
        more |= {"scale_init": nnx.initializers.zeros, "promote_dtype": _with_offset}
    return nnx.RMSNorm(features, epsilon=epsilon, **more)


def _with_offset(values: tuple[jax.Array, jax.Array], *, dtype: Any) -> tuple:
    """Returns RMSNorm's input and 1 + its scale, which stays in float32 or wider."""
    x, scale = values
    wide = jnp.promote_types(scale.dtype, jnp.float32)
    return x.astype(dtype or jnp.result_type(x, scale)), 1 + scale.astype(wide)
