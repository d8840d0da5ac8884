"""The parity reference: a plain Flax model, optax as it is, one device, no jshard.

``Plain`` is written with ``nnx.List``; ``Sharded`` is the same model with a Stack and
Units. Both see the same parameters and batches, and must go the same way.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

import jshard
from filled import filled

STEPS = 5
# The embedding has more rows than most meshes' devices have tokens.
TIME, VOCABULARY = 8, 64
CLIP = 0.5  # below every gradient norm of these runs, so that clipping acts


@dataclasses.dataclass(frozen=True)
class Variant:
    """What is trained, and on what; every combination is a model."""

    batch: int = 32
    layers: int = 3
    d_model: int = 16
    d_hidden: int = 32
    tied: bool = False
    dropout: bool = False
    frozen: bool = False
    padding: bool = False
    two_losses: bool = False


class Block(nnx.Module):
    def __init__(self, variant: Variant, *, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, param_dtype=jnp.float64, rngs=rngs)
        self.norm = nnx.LayerNorm(variant.d_model, param_dtype=jnp.float64, rngs=rngs)
        self.up = linear(variant.d_model, variant.d_hidden)
        self.down = linear(variant.d_hidden, variant.d_model)
        self.dropout = jshard.Dropout(0.2 if variant.dropout else 0.0, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        h_BTF = checkpoint_name(self.up(self.norm(x_BTD)), "hidden")
        past_BTF = (
            jnp.cumsum(h_BTF, axis=1) / jnp.arange(1, h_BTF.shape[1] + 1)[:, None]
        )
        return x_BTD + self.dropout(self.down(jax.nn.gelu(h_BTF + past_BTF)))


class Plain(nnx.Module):
    """Token ids (B, T) to logits (B, T, V)."""

    def __init__(self, variant: Variant, *, rngs: nnx.Rngs):
        d_model, float64 = variant.d_model, jnp.float64
        self.embed = nnx.Embed(VOCABULARY, d_model, param_dtype=float64, rngs=rngs)
        self.blocks = nnx.List(
            [Block(variant, rngs=rngs) for _ in range(variant.layers)]
        )
        self.norm = nnx.LayerNorm(d_model, param_dtype=float64, rngs=rngs)
        self.head = (
            None
            if variant.tied
            else nnx.Linear(d_model, VOCABULARY, param_dtype=float64, rngs=rngs)
        )

    def apply_blocks(self, x_BTD: jax.Array) -> jax.Array:
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return x_BTD

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        x_BTD = self.norm(self.apply_blocks(self.embed(tokens_BT)))
        return self.embed.attend(x_BTD) if self.head is None else self.head(x_BTD)


class Sharded(Plain):
    """The same, with gathers: what a user of jshard writes."""

    def __init__(self, variant: Variant, *, rngs: nnx.Rngs):
        super().__init__(variant, rngs=rngs)
        self.embed = jshard.Unit(self.embed)
        self.blocks = jshard.Stack(
            lambda rngs: Block(variant, rngs=rngs), variant.layers, rngs=rngs
        )
        self.head = self.head and jshard.Unit(self.head)

    def apply_blocks(self, x_BTD: jax.Array) -> jax.Array:
        return self.blocks(x_BTD)


def trained(variant: Variant) -> Callable[[tuple, Any], bool]:
    """The ``wrt`` filter: frozen are the embedding, and in each block a matrix."""

    def select(path: tuple, value: Any) -> bool:
        frozen = "embed" in path or path[-2:] == ("up", "kernel")
        return isinstance(value, nnx.Param) and not (variant.frozen and frozen)

    return select


def batches(variant: Variant) -> Iterator[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        shape = (variant.batch, TIME)
        weights = np.ones(shape)
        if variant.padding:  # uneven counts, and devices that see nothing but padding
            weights = (
                np.arange(TIME) < rng.integers(1, TIME, (variant.batch, 1))
            ) * 1.0
            weights[variant.batch - 13 :] = 0
        yield {
            "tokens": rng.integers(0, VOCABULARY, shape),
            "targets": rng.integers(0, VOCABULARY, shape),
            "weights": weights,
        }


# (weight, total, count) of each term of the loss, and of each named mean (total, count)
Sums = tuple[list[tuple[float, Any, Any]], dict[str, tuple[Any, Any]]]


def sums(variant: Variant, model: nnx.Module, batch: dict[str, Any]) -> Sums:
    logits_BTV = model(batch["tokens"])  # pyright: ignore[reportCallIssue]
    ce_BT = optax.softmax_cross_entropy_with_integer_labels(
        logits_BTV, batch["targets"]
    )
    weights_BT = batch["weights"]
    terms = [(1.0, jnp.sum(ce_BT * weights_BT), jnp.sum(weights_BT))]
    if not variant.two_losses:
        return terms, {}
    odd_BT = weights_BT * (batch["tokens"] % 2)  # counted over other tokens
    z = jnp.sum(odd_BT * jax.nn.logsumexp(logits_BTV, axis=-1) ** 2), jnp.sum(odd_BT)
    return [*terms, (0.1, *z)], {"z": z, "ce": terms[0][1:]}


def matrices(params: Any) -> Any:
    """A mask: decay what is a matrix."""
    return jax.tree.map(lambda p: p.ndim >= 2, params)


TRANSFORMATIONS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=matrices),
    "lion": lambda: optax.lion(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.9),
    "lamb": lambda: optax.lamb(1e-2, weight_decay=0.1),
    "muon": lambda: optax.contrib.muon(1e-2),
}
ELEMENTWISE = ("sgd", "lion")  # these do not care what is one tensor


def optimizer(name: str, per_layer: Callable = lambda tx: tx) -> Any:
    """An optax optimizer behind global clipping, under ``per_layer`` where it needs."""
    if per_layer is jshard.optim.per_layer:
        tx = of_layers(name)
    else:
        tx = TRANSFORMATIONS[name]()
    return jshard.optim.chain(optax.clip_by_global_norm(CLIP), tx)


def of_layers(name: str) -> Any:
    """An optimizer for Stacks, under ``per_layer`` where it needs."""
    if name == "muon":
        return jshard.optim.muon(1e-2)
    tx = TRANSFORMATIONS[name]()
    return tx if name in ELEMENTWISE else jshard.optim.per_layer(tx)


def make_update(tx: Any) -> Callable[..., tuple[Any, Any]]:
    """Jitted: (gradients, optimizer state, parameters) to new parameters and state."""

    @jax.jit
    def update(grads: Any, opt_state: Any, params: Any, **extra: Any) -> Any:
        updates, opt_state = tx.update(grads, opt_state, params, **extra)
        return optax.apply_updates(params, updates), opt_state

    return update


@dataclasses.dataclass(frozen=True)
class Run:
    """What a training run left: metrics of every step, and its end by path."""

    metrics: dict[str, np.ndarray]  # (steps,) each
    params: dict[tuple, Any]  # frozen ones, too
    opt_state: Any


def by_path(state: nnx.State) -> dict[tuple, Any]:
    """Arrays by their path in ``Plain``: those of a Stack taken apart by layer."""
    arrays = {}
    for path, variable in nnx.to_flat_state(state):
        value = variable.get_value()
        if isinstance(value, optax.MaskedNode):
            continue
        if path[0] == "blocks" and not isinstance(path[1], int):
            if not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
                value = np.asarray(value)  # JAX compiles a program for each index
            layers = {("blocks", i, *path[1:]): value[i] for i in range(len(value))}
            arrays |= layers
        else:
            arrays[path] = value
    return arrays


@functools.cache
def plain_steps(variant: Variant, units: bool) -> tuple[nnx.State, nnx.State, Callable]:
    """(trained parameters, all other state, jitted value and gradients)."""
    abstract = nnx.eval_shape(lambda: Plain(variant, rngs=nnx.Rngs(0)))
    graphdef, params, rest = nnx.split(abstract, trained(variant), ...)
    # Outside a mesh, jshard's model has the initial values that it has on any.
    initial = by_path(nnx.state(made(variant, units)))
    for state in (params, rest):
        for path, variable in nnx.to_flat_state(state):
            variable.set_value(initial.pop(path))
    assert not initial, "the two models have different parameters"

    def loss(params: nnx.State, rest: nnx.State, batch: dict) -> Any:
        model = nnx.merge(graphdef, params, rest, copy=True)
        terms, named = sums(variant, model, batch)
        value = sum(weight * total / count for weight, total, count in terms)
        means = {name: total / count for name, (total, count) in named.items()}
        return value, (means, nnx.state(model, nnx.Not(trained(variant))))

    return params, rest, jax.jit(jax.value_and_grad(loss, has_aux=True))


def make_model(variant: Variant, units: bool) -> Callable[[nnx.Rngs], nnx.Module]:
    return lambda rngs: (Plain if units else Sharded)(variant, rngs=rngs)


@functools.cache
def made(variant: Variant, units: bool) -> nnx.Module:
    """The model, made once and by NumPy: JAX would compile its random numbers."""
    return filled(lambda: make_model(variant, units)(nnx.Rngs(0)))


@functools.cache
def reference(variant: Variant, name: str, units: bool = False) -> Run:
    """Trains ``Plain`` on one device with JAX and optax alone."""
    params, rest, value_and_grad = plain_steps(variant, units)
    tx = optimizer(name)
    opt_state = jax.jit(tx.init)(params)

    update, norm_of, history = make_update(tx), jax.jit(optax.tree.norm), []
    for batch in batches(variant):
        (loss, (means, rest)), grads = value_and_grad(params, rest, batch)
        history.append({"loss": loss, "grad_norm": norm_of(grads)} | means)
        params, opt_state = update(grads, opt_state, params)
    metrics = _stack(history)
    assert metrics["grad_norm"].max() > CLIP, "clipping never acted"
    frozen = nnx.filter_state(rest, nnx.Param)
    return Run(metrics, by_path(params) | by_path(frozen), opt_state)


def train(
    variant: Variant,
    tx: Any,
    mesh: jax.sharding.Mesh,
    policy: jshard.Policy,
    units: bool = False,
) -> Run:
    """Trains ``Sharded`` (or ``Plain`` with ``units``) on a mesh with jshard."""
    wrapped = (Block, nnx.Embed, nnx.Linear) if units else ()
    fsdp = jshard.FSDP(mesh, policy, units=wrapped)

    def loss_fn(model: nnx.Module, batch: dict[str, Any]) -> Any:
        terms, named = sums(variant, model, batch)
        loss = sum(weight * jshard.Mean(*mean) for weight, *mean in terms)
        return loss, {name: jshard.Mean(*mean) for name, mean in named.items()}

    state = fsdp.from_model(made(variant, units), tx, wrt=trained(variant))
    step = fsdp.train_step(loss_fn, tx)
    history = []
    for batch in batches(variant):
        state, metrics = step(state, fsdp.shard_batch(batch))
        history.append(metrics)
    assert int(state.step) == STEPS
    params = by_path(fsdp.fetch(state.params)) | by_path(fsdp.fetch(state.frozen))
    return Run(_stack(history), params, fsdp.fetch(state.opt_state))


def _stack(history: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    return {k: np.array([metrics[k] for metrics in history]) for k in history[0]}


def error(got: Any, want: Any) -> float:
    """The largest difference, relative to the largest value; a nan is inf.

    ``max`` over several errors would pass over a nan.
    """
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype == np.float64
    differences = np.nan_to_num(np.abs(got - want), nan=np.inf)
    difference, size = np.max(differences), np.max(np.abs(want))
    return float(difference / size) if size else float(difference)


def worst(got: dict[Any, Any], want: dict[Any, Any]) -> float:
    """The worst error of all arrays, which must be the same ones."""
    assert got.keys() == want.keys()
    return max(error(got[key], want[key]) for key in want)


def pairwise(factors: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Rows that together hold every pair of values of any two factors.

    Greedy: each row starts from a pair that is still missing, and takes for every
    other factor the value that adds most missing pairs.
    """
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(factors, 2)
        for x, y in itertools.product(range(len(factors[a])), range(len(factors[b])))
    }
    order = {name: i for i, name in enumerate(factors)}

    def pair(one: tuple[str, int], two: tuple[str, int]) -> tuple:
        return (one, two) if order[one[0]] < order[two[0]] else (two, one)

    rows = []
    while missing:
        row = dict(min(missing, key=lambda p: [(order[n], i) for n, i in p]))
        for name in factors:
            if name not in row:
                row[name] = max(
                    range(len(factors[name])),
                    key=lambda i, row=row, name=name: sum(
                        pair((name, i), other) in missing for other in row.items()
                    ),
                )
        missing -= {pair(*two) for two in itertools.combinations(row.items(), 2)}
        rows.append({name: factors[name][row[name]] for name in factors})
    return rows


def every_pair(**factors: tuple[Any, ...]) -> Any:
    """A test by ``case``, over rows that together hold every pair of values."""
    params = [pytest.param(row, id=_name(row)) for row in pairwise(factors)]
    return pytest.mark.parametrize("case", params)


def _name(row: dict[str, Any]) -> str:
    return "-".join(str(value).replace(" ", "") for value in row.values())


def make_mesh(replica: int, fsdp: int) -> Mesh:
    devices = jax.devices()[: replica * fsdp]
    return jshard.make_mesh(replica=replica, fsdp=fsdp, devices=devices)
