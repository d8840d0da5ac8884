"""A small decoder, stacked or a plain list of layers, and its lowered step.

Its widths differ, so that an array's size tells which parameter it is.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jshard
from jshard.optim import sharded_update


@dataclasses.dataclass(frozen=True)
class Sizes:
    layers: int = 4
    width: int = 16
    hidden: int = 40
    vocab: int = 72
    length: int = 8
    dtype: Any = jnp.float32  # of the blocks' computation; parameters are float32


class Block(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(sizes.width, rngs=rngs)
        linear = functools.partial(nnx.Linear, dtype=sizes.dtype, rngs=rngs)
        self.up = linear(sizes.width, sizes.hidden)
        self.down = linear(sizes.hidden, sizes.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = checkpoint_name(jax.nn.gelu(self.up(self.norm(x))), "hidden")
        return x + self.down(hidden).astype(x.dtype)


class Head(nnx.Linear):
    """A type of its own, so that ``units=`` can tell it from a block's layers."""


class Decoder(nnx.Module):
    """Embed, blocks, norm (the root), head."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.embed = jshard.Unit(nnx.Embed(sizes.vocab, sizes.width, rngs=rngs))
        self.blocks = jshard.Stack(lambda r: Block(sizes, r), sizes.layers, rngs=rngs)
        self.norm = nnx.LayerNorm(sizes.width, rngs=rngs)
        self.head = jshard.Unit(Head(sizes.width, sizes.vocab, rngs=rngs))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(self.norm(self.blocks(self.embed(tokens))))


class PlainDecoder(nnx.Module):
    """The same as its author wrote it, for ``units=UNITS``."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.embed = nnx.Embed(sizes.vocab, sizes.width, rngs=rngs)
        self.blocks = nnx.List([Block(sizes, rngs) for _ in range(sizes.layers)])
        self.norm = nnx.LayerNorm(sizes.width, rngs=rngs)
        self.head = Head(sizes.width, sizes.vocab, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


UNITS = (Block, nnx.Embed, Head)


def loss_fn(model: Any, batch: dict[str, jax.Array]) -> jshard.Mean:
    loss = optax.softmax_cross_entropy_with_integer_labels(
        model(batch["tokens"]), batch["targets"]
    )
    return jshard.Mean(jnp.sum(loss), loss.size)


def make_decoder(sizes: Sizes, *, plain: bool = False) -> Any:
    """``make_model`` of the stacked or the plain decoder."""
    return lambda rngs: (PlainDecoder if plain else Decoder)(sizes, rngs)


def make_fsdp(
    policy: jshard.Policy, *, replica: int = 1, plain: bool = False
) -> jshard.FSDP:
    mesh = jshard.make_mesh(replica=replica)
    return jshard.FSDP(mesh, policy, units=UNITS if plain else ())


def lower_step(
    fsdp: jshard.FSDP,
    sizes: Sizes,
    *,
    plain: bool = False,
    wrt: Any = nnx.Param,
    examples: int = 32,
) -> tuple[jax.stages.Lowered, jshard.TrainState]:
    """A step of the decoder with SGD, and its abstract state. Nothing is allocated."""
    optimizer = optax.sgd(0.1, momentum=0.9)
    state = fsdp.abstract_state(make_decoder(sizes, plain=plain), optimizer, wrt)
    tokens = jax.ShapeDtypeStruct((examples, sizes.length), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    return fsdp.train_step(loss_fn, optimizer).lower(state, batch), state


def _chain(tx: Any) -> Any:
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


# As parity has them: each behind global clipping, per_layer where tensors are looked at
# as wholes.
OPTIMIZERS = {
    "sgd": _chain(optax.sgd(1e-2, momentum=0.9)),
    "adamw": _chain(optax.adamw(1e-3)),
    "lion": _chain(optax.lion(1e-3)),
    "adafactor": _chain(
        jshard.per_layer(optax.adafactor(1e-3, min_dim_size_to_factor=8))
    ),
    "lamb": _chain(jshard.per_layer(optax.lamb(1e-3))),
    "muon": _chain(jshard.per_layer(optax.contrib.muon(1e-3))),
}


def lower_update(
    fsdp: jshard.FSDP, make_model: Any, optimizer: Any
) -> tuple[jax.stages.Lowered, jshard.TrainState]:
    """The update of a step alone, parameters and moments donated."""
    state = fsdp.abstract_state(make_model, optimizer)

    def update(grads: Any, opt_state: Any, params: Any) -> Any:
        with sharded_update(fsdp.mesh, fsdp.policy):
            updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    after = jax.tree.map(lambda x: x.sharding, (state.params, state.opt_state))
    jitted = jax.jit(update, donate_argnums=(1, 2), out_shardings=after)
    return jitted.lower(state.params, state.opt_state, state.params), state
