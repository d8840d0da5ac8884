"""A small decoder, stacked or a plain list of layers: its step, and what that moves.

Its widths differ, so that an array's size tells which parameter it is.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import hlo
import jshard
from jshard.sharding.layout.layer_dims import layer_dims
from jshard.sharding.layout.specs import sharded_dim
from jshard.sharding.settings.mesh import FSDP, REPLICA
from jshard.sharding.update.whole_layers import sharded_update


@dataclasses.dataclass(frozen=True)
class Sizes:
    layers: int = 4
    width: int = 16
    hidden: int = 40
    vocab: int = 72
    length: int = 8
    dtype: Any = None  # of the blocks' computation; parameters are float32
    rank: int = 0  # of the adapters of a block's matrices, if any


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
EXAMPLES = 32  # of a step
TABLE = "embed.embedding"
MOMENTUM = optax.sgd(0.1, momentum=0.9)


def loss_fn(model: Any, batch: Mapping[str, Any]) -> jshard.Mean:
    loss = optax.softmax_cross_entropy_with_integer_labels(
        model(batch["tokens"]), batch["targets"]
    )
    return jshard.Mean(jnp.sum(loss), loss.size)


def make_decoder(sizes: Sizes, *, plain: bool = False) -> Any:
    """``make_model`` of the stacked or the plain decoder."""

    def make(rngs: nnx.Rngs) -> nnx.Module:
        model = (PlainDecoder if plain else Decoder)(sizes, rngs)
        if sizes.rank:
            jshard.nn.add_lora(model, rank=sizes.rank, alpha=8, rngs=rngs)
        return model

    return make


def make_fsdp(
    policy: jshard.Policy, *, replica: int = 1, plain: bool = False
) -> jshard.FSDP:
    mesh = jshard.make_mesh(replica=replica)
    return jshard.FSDP(mesh, policy, units=UNITS if plain else ())


def policies(**knobs: Any) -> jshard.Policy:
    return jshard.Policy(min_shard_elements=0, **knobs)


def lower_step(
    fsdp: jshard.FSDP,
    sizes: Sizes,
    *,
    plain: bool = False,
    wrt: Any = nnx.Param,
    examples: int = EXAMPLES,
    optimizer: optax.GradientTransformation = MOMENTUM,
) -> tuple[jax.stages.Lowered, jshard.TrainState]:
    """A step of the decoder, and its abstract state. Nothing is allocated."""
    state = fsdp.abstract_state(make_decoder(sizes, plain=plain), optimizer, wrt)
    tokens = jax.ShapeDtypeStruct((examples, sizes.length), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    return fsdp.train_step(loss_fn, optimizer).lower(state, batch), state


def _chain(tx: Any) -> Any:
    return jshard.optim.chain(optax.clip_by_global_norm(1.0), tx)


# As parity has them: each behind global clipping, per_layer where tensors are looked at
# as wholes.
OPTIMIZERS = {
    "sgd": _chain(optax.sgd(1e-2, momentum=0.9)),
    "adamw": _chain(optax.adamw(1e-3)),
    "lion": _chain(optax.lion(1e-3)),
    "adafactor": _chain(
        jshard.optim.per_layer(optax.adafactor(1e-3, min_dim_size_to_factor=8))
    ),
    "lamb": _chain(jshard.optim.per_layer(optax.lamb(1e-3))),
    "muon": _chain(jshard.optim.muon(1e-3)),
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


ROOT = {"norm.scale", "norm.bias"}
# What a backward pass reads, besides what was kept. No bias that is added last, and of
# an embedding only the gradient.
HEAD = {"head.kernel"}
KERNELS = HEAD | {"blocks.up.kernel", "blocks.down.kernel"}
RECOMPUTED = KERNELS | {"blocks.norm.scale", "blocks.norm.bias", "blocks.up.bias"}
REMATS: dict[str, tuple[Any, set[str]]] = {
    "full": ("full", RECOMPUTED),
    "dots": ("dots", RECOMPUTED),
    "names": (jshard.Names("hidden"), RECOMPUTED),
    # The norm multiplies by scale / deviation, and keeps neither.
    "none": ("none", KERNELS | {"blocks.norm.scale"}),
    "everything": (
        jax.checkpoint_policies.everything_saveable,
        KERNELS | {"blocks.norm.scale"},
    ),
}


def local_tokens(fsdp: jshard.FSDP) -> int:
    """Of a device, in one micro-batch of a step."""
    return EXAMPLES * Sizes.length // fsdp.mesh.size // fsdp.policy.accumulate


def expected(fsdp: jshard.FSDP, state: jshard.TrainState, reads: set[str]) -> Counter:
    """Runs of each (kind, devices, elements) that the invariants ask for.

    A device has fewer tokens than the embedding has rows, unless the mesh is small.

    Args:
      fsdp: mesh and policy.
      state: the abstract state.
      reads: parameters that the backward (of layers with remat) gathers again, if it
        reshards.
    """
    mesh, policy = fsdp.mesh, fsdp.policy
    shards, replicas = mesh.shape[FSDP], mesh.shape[REPLICA]
    counts: Counter = Counter()
    for params, trained in ((state.params, True), (state.frozen, False)):
        for path, variable in nnx.to_flat_state(params):
            name = ".".join(str(part) for part in path if not isinstance(part, int))
            shape = np.shape(variable.get_value())
            layered = layer_dims(variable) > 0
            stack = int(shape[0]) if layered else 1
            layer = int(np.prod(shape)) // stack
            if sharded_dim(variable, policy, mesh)[0] is None:
                counts["all-reduce", mesh.size, stack * layer] += trained
                continue
            if name == TABLE and _exchanged(fsdp, shape[0]):
                tokens, width = local_tokens(fsdp), shape[1]
                sent, again = "all-to-all", trained * policy.accumulate
                counts[sent, shards, shards * tokens] += policy.accumulate  # their ids
                counts[sent, shards, tokens * width] += policy.accumulate + again
                counts["all-reduce", replicas, layer // shards] += trained
                continue
            whole = policy.defer_scatter  # all layers of a stack at once, and no more
            size, runs = stack * layer, 1
            if not whole:
                size, runs = layer, stack * policy.accumulate
                again = _gather_again(policy, name, reads, stack if layered else None)
                kept = policy.reshard_after_forward
                kept = policy.reshard_root if name in ROOT else kept
                devices = shards if kept is True else int(kept)
                counts["all-gather", devices, size] += again * policy.accumulate
            counts["all-gather", shards, size] += runs
            counts["reduce-scatter", shards, size] += trained * runs
            # Over replicas travel shards; with accumulation once, when they are summed.
            if whole or policy.accumulate > 1:
                size, runs = stack * layer, 1
            counts["all-reduce", replicas, size // shards] += trained * runs
    # A group of one moves nothing.
    return Counter({key: n for key, n in counts.items() if n and key[1] > 1})


def _exchanged(fsdp: jshard.FSDP, rows: int) -> bool:
    return local_tokens(fsdp) < rows and not fsdp.policy.defer_scatter


def _gather_again(
    policy: jshard.Policy, name: str, reads: set[str], layers: int | None
) -> int:
    """How many layers of a Stack, or a Unit (None), gather a parameter again."""
    if layers is None:
        return name in reads
    first = layers if policy.first_k is None else policy.first_k
    later = REMATS["none"][1]
    return sum(name in (reads if i < first else later) for i in range(layers))


def counted(found: list[hlo.Collective]) -> Counter:
    """Runs of each (kind, devices, elements of the full array), less scalars."""
    counts: Counter = Counter()
    for c in found:
        whole = c.results if c.kind == "all-gather" else c.operands
        if c.kind == "all-to-all":  # an operand for each device
            counts[c.kind, c.group, sum(array.size for array in whole)] += c.times
            continue
        for array in whole:
            if not (c.kind == "all-reduce" and hlo.is_number(array)):
                counts[c.kind, c.group, array.size] += c.times
    return counts


def check_counts(
    policy: jshard.Policy,
    reads: set[str],
    *,
    replica: int = 1,
    plain: bool = False,
    sizes: Sizes = Sizes(),
    wrt: Any = nnx.Param,
) -> None:
    """Asserts that a step runs the collectives expected, and no others."""
    fsdp = make_fsdp(policy, replica=replica, plain=plain)
    lowered, state = lower_step(fsdp, sizes, plain=plain, wrt=wrt)
    check_found(fsdp, state, hlo.collectives(hlo.compile(lowered).as_text()), reads)


def check_found(
    fsdp: jshard.FSDP,
    state: jshard.TrainState,
    found: list[hlo.Collective],
    reads: set[str],
) -> None:
    """Asserts that the collectives of a compiled step are those expected."""
    assert counted(found) == expected(fsdp, state, reads)
    # Scalars (counts, losses, norms) are reduced once per step, not once per
    # micro-batch: neither do the passes that only count.
    sums = [c for c in found if c.kind == "all-reduce"]
    scalars = [c for c in sums if hlo.is_number(c.operands[0])]
    assert {c.times for c in scalars} == {1}


def bytes_in(kind: str | None, tree: Any) -> int:
    """Of arrays in this memory, what belongs to one device."""
    return sum(
        int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
        if x.sharding.memory_kind == kind
    )


def values_like(tree: Any, seed: int = 0) -> Any:
    """Random float32 in the shapes of ``tree``."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jax.device_put(np.asarray(rng.normal(size=x.shape), "f4")), tree
    )
