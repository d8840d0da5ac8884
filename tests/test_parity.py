"""Sharded training follows a plain one-device run: losses, norms, parameters, moments.

Float64 and a relative error of at most 1e-9, on every mesh, with every optimizer.
``parity.py`` holds the plain run, which has no jshard code. Measured errors are below
1e-13, Muon's included: optax iterates in the dtype of the update, here float64.
"""

import dataclasses
import itertools
import math
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

import jshard
import parity

pytestmark = pytest.mark.usefixtures("x64")

BOUND = 1e-9
FLOAT16_BOUND = 5e-3
MESHES = ((1, 1), (1, 2), (1, 8), (2, 4), (4, 2), (8, 1))  # replica, fsdp
ODD_MESHES = ((1, 5), (1, 6), (2, 3))  # shards are padded
REMATS = ("full", "dots", "none", jshard.Names("hidden"))

# What else a case may be; by default none of it.
FLAGS: dict[str, dict[str, Any]] = {
    "tied": {"tied": True},
    "dropout": {"dropout": True},
    "frozen": {"frozen": True},
    "indivisible": {"d_model": 10, "d_hidden": 7},
    "padding": {"padding": True},
    "two_losses": {"two_losses": True},
}


@dataclasses.dataclass(frozen=True)
class Case:
    mesh: tuple[int, int] = (2, 4)
    optimizer: str = "adamw"
    accumulate: int = 1
    remat: Any = "full"
    reshard: bool | int = True
    first_k: int | None = None
    prefetch: bool = False
    unroll: bool = False
    reshard_root: bool | int = False
    defer: bool = False
    units: bool = False  # the plain nnx.List model under FSDP(units=...)
    tied: bool = False
    dropout: bool = False
    frozen: bool = False
    indivisible: bool = False
    padding: bool = False
    two_losses: bool = False
    layers: int = 3

    def variant(self) -> parity.Variant:
        chosen = [fields for name, fields in FLAGS.items() if getattr(self, name)]
        flags = {k: v for fields in chosen for k, v in fields.items()}
        devices = math.prod(self.mesh)
        batch = 32 if 32 % devices == 0 else 4 * devices
        return parity.Variant(batch=batch, layers=self.layers, **flags)


FACTORS: dict[str, tuple[Any, ...]] = {
    "mesh": MESHES + ODD_MESHES,
    # Lion is elementwise, as SGD is.
    "optimizer": tuple(name for name in parity.TRANSFORMATIONS if name != "lion"),
    "accumulate": (1, 4),
    "remat": REMATS,
    "reshard": (True, False, 2),
    "prefetch": (False, True),
    "unroll": (False, True),
    "units": (False, True),
    **dict.fromkeys(FLAGS, (False, True)),
    "layers": (3, 1, 5),
}


def check(case: Case, mesh: Mesh | None = None) -> None:
    mesh = mesh or parity.make_mesh(*case.mesh)
    shards, reshard = mesh.shape["fsdp"], case.reshard
    if not isinstance(reshard, bool) and shards % reshard:
        reshard = shards  # groups divide the axis
    policy = jshard.Policy(
        remat=case.remat,
        first_k=case.first_k,
        defer_scatter=case.defer,
        reshard_after_forward=reshard,
        prefetch=case.prefetch,
        unroll=case.unroll,
        reshard_root=case.reshard_root,
        accumulate=case.accumulate,
        min_shard_elements=0,  # shard all that can be: these models are tiny
    )
    tx = parity.optimizer(case.optimizer, jshard.optim.per_layer)
    got = parity.train(case.variant(), tx, mesh, policy, case.units)
    want = parity.reference(case.variant(), case.optimizer, case.units)
    assert parity.worst(got.metrics, want.metrics) <= BOUND
    assert parity.worst(got.params, want.params) <= BOUND
    if case.optimizer == "adamw":
        for name in ("mu", "nu"):
            assert parity.worst(moments(got, name), moments(want, name)) <= BOUND


def moments(run: parity.Run, name: str) -> dict[tuple, Any]:
    """AdamW's moments by path."""
    found = optax.tree.get_all_with_path(run.opt_state, name)
    return {k: v for _, state in found for k, v in parity.by_path(state).items()}


def alternating(names: str, values: Any, others: Any) -> Any:
    """Each value with the next of the others: all pairs are in FACTORS' rows."""
    return pytest.mark.parametrize(names, list(zip(values, itertools.cycle(others))))


# Each knob and flag once, with few layers.
FEW = {
    "hybrid mesh": Case(
        mesh=(2, 4),
        accumulate=2,
        prefetch=True,
        reshard=2,
        reshard_root=True,
        layers=2,
    ),
    "one scatter of tied weights": Case(
        mesh=(4, 2),
        optimizer="sgd",
        first_k=1,
        defer=True,
        accumulate=2,
        frozen=True,
        tied=True,
        layers=2,
    ),
    "units on three devices": Case(
        mesh=(1, 3),
        optimizer="sgd",
        units=True,
        remat="none",
        indivisible=True,
        dropout=True,
        padding=True,
        two_losses=True,
        layers=1,
    ),
}
MARKS = {
    "hybrid mesh": pytest.mark.core,
    # By default, test_products.py has three devices and test_rngs.py Flax's masks.
    "units on three devices": pytest.mark.slow,
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=MARKS.get(name, []))
        for name, case in FEW.items()
    ],
)
def test_training_follows_the_plain_run(case):
    check(case)


# Several layers, whose weights are gathered again.
ROWS = {
    "one gather at a time": Case(mesh=(1, 8), dropout=True),
    "prefetch": Case(mesh=(1, 8), prefetch=True, first_k=1, remat="dots", layers=5),
    "prefetch beside sums over copies": Case(
        prefetch=True, first_k=1, reshard=2, layers=4
    ),
    "micro-batches": Case(
        mesh=(1, 4), accumulate=4, reshard_root=True, padding=True, two_losses=True
    ),
    "micro-batches on a hybrid mesh": Case(
        accumulate=2, remat=jshard.Names("hidden"), tied=True
    ),
    "one scatter a step": Case(defer=True, accumulate=2, frozen=True),
    "muon": Case(mesh=(4, 2), optimizer="muon", unroll=True, layers=2),
    "units": Case(units=True, reshard=2, remat="none", indivisible=True),
    "three devices": Case(mesh=(1, 3), prefetch=True, first_k=1, remat="dots"),
    "five devices": Case(mesh=(1, 5), optimizer="muon", reshard_root=True),
    "six devices": Case(mesh=(1, 6), optimizer="lamb", reshard=2, indivisible=True),
    "seven devices": Case(mesh=(1, 7), accumulate=2, defer=True, dropout=True),
    "two times three": Case(mesh=(2, 3), optimizer="adafactor", units=True, tied=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ROWS.values(), ids=ROWS)
def test_training_of_several_layers_follows_the_plain_run(case):
    check(case)


@pytest.mark.slow  # optim/test_loss_scale.py has parameters in float16
@pytest.mark.parametrize("prefetch", [False, True])
def test_float16_with_a_loss_scale_follows_the_plain_run(prefetch):
    precision = jshard.Precision(
        param="float64", gather="float16", compute="float16", reduce="float16"
    )
    policy = jshard.Policy(
        precision=precision,
        loss_scale=True,
        remat="none",
        accumulate=2,
        prefetch=prefetch,
        min_shard_elements=0,
    )
    variant, mesh = parity.Variant(layers=2), parity.make_mesh(2, 4)
    tx = parity.optimizer("sgd")
    got, want = (
        parity.train(variant, tx, mesh, policy),
        parity.reference(variant, "sgd"),
    )
    assert got.metrics["skipped_steps"].max() == 0
    for name, values in want.metrics.items():
        np.testing.assert_allclose(got.metrics[name], values, rtol=FLOAT16_BOUND)
    assert parity.worst(got.params, want.params) <= FLOAT16_BOUND


# Every optimizer and every flag on every mesh, too.
@pytest.mark.slow
@parity.every_pair(**FACTORS)
def test_training_follows_the_plain_run_for_every_pair_of_choices(case):
    check(Case(**case))


@pytest.mark.slow
def test_training_follows_the_plain_run_on_a_mesh_with_an_automatic_third_axis():
    devices = np.array(jax.devices()[:8]).reshape(2, 2, 2)
    mesh = Mesh(devices, ("replica", "fsdp", "model"), axis_types=(AxisType.Auto,) * 3)
    check(Case(optimizer="muon", remat="none"), mesh)


@pytest.mark.slow
@alternating("group, units", (1, 2, 4, 8), (False, True))
def test_training_follows_the_plain_run_with_weights_kept_in_groups(group, units):
    check(Case(mesh=(1, 8), reshard=group, units=units, remat="dots"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first_k", "remat"),
    list(zip((0, 1, 3, 2), REMATS, strict=True)),
)
def test_training_follows_the_plain_run_with_remat_of_the_first_layers(first_k, remat):
    check(Case(first_k=first_k, remat=remat, dropout=True, two_losses=True))


@pytest.mark.slow
@pytest.mark.parametrize("first_k", [1, 2])
def test_training_follows_the_plain_run_with_remat_of_the_first_layers_in_groups(
    first_k,
):
    case = Case(first_k=first_k, remat="dots", reshard=2)
    check(dataclasses.replace(case, frozen=True, accumulate=4, two_losses=True))


@pytest.mark.slow
@alternating("mesh, reshard", MESHES[1:], (True, False, 2))
def test_training_follows_the_plain_run_with_transfers_beside_other_layers(
    mesh, reshard
):
    case = Case(mesh=mesh, reshard=reshard, frozen=True, prefetch=True, dropout=True)
    check(dataclasses.replace(case, remat="dots", accumulate=2, two_losses=True))


@pytest.mark.slow
@pytest.mark.parametrize(  # all pairs
    ("reshard_root", "accumulate", "units"),
    [(True, 1, False), (True, 4, True), (2, 1, True), (2, 4, False)],
)
def test_training_follows_the_plain_run_with_a_root_that_is_gathered_again(
    reshard_root, accumulate, units
):
    case = Case(reshard_root=reshard_root, accumulate=accumulate, units=units)
    check(dataclasses.replace(case, tied=True, dropout=True, two_losses=True))


@pytest.mark.slow
@alternating("mesh, units", MESHES[2:], (False, True))
def test_training_follows_the_plain_run_with_one_scatter_a_step(mesh, units):
    case = Case(mesh=mesh, accumulate=4, defer=True, units=units, tied=True)
    check(dataclasses.replace(case, frozen=True, dropout=True, padding=True))


@pytest.mark.slow
def test_training_follows_the_plain_run_with_sharded_optimizer_state_alone():
    check(Case(defer=True, tied=True))


@pytest.mark.slow
@pytest.mark.parametrize("units", [False, True])
def test_training_follows_the_plain_run_with_activations_on_the_host(units):
    check(Case(remat=jshard.Offload("hidden"), units=units, dropout=True))
