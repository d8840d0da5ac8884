"""What jshard does is the same within any mesh that the caller has set."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jshard
import jshard.sharding.settings.state
from mesh_contexts import (
    BATCH,
    CONTEXTS,
    FUNCTIONS,
    KINDS,
    TX,
    Net,
    Program,
    loss_fn,
    mesh_of,
    same,
    table,
)

FIGURES = Path(__file__).parents[3] / "docs" / "figures" / "axes.md"


@pytest.fixture(scope="module")
def program():
    return Program("Explicit")


@pytest.fixture(scope="module")
def alone(program, tmp_path_factory):
    return program.results(tmp_path_factory.mktemp("alone"), BATCH, init=False)


@pytest.mark.quick("other axes-Explicit")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["own", "other axes"])
def test_within_any_mesh_of_the_same_devices_all_is_as_without(
    program, alone, name, kind, tmp_path
):
    with jax.set_mesh(mesh_of(name, kind)):
        found = program.results(tmp_path, BATCH, init=False)
    assert [f for f, x in found.items() if not same(x, alone[f])] == []


@pytest.mark.quick("Explicit")
@pytest.mark.parametrize("kind", KINDS)
def test_within_a_mesh_of_other_devices_steps_run_and_calls_are_refused(
    program, alone, kind
):
    with jax.set_mesh(mesh_of("other devices", kind)):
        _, metrics = program.train_step(program.state.copy(), BATCH)
        means = program.eval_step(program.state, program.fsdp.shard_batch(BATCH))
        assert (means + means).compute() == alone["eval"]
        with pytest.raises(jshard.UserError, match=r"or within jax\.set_mesh\("):
            program.fsdp.model(program.state)
        with pytest.raises(jshard.UserError, match=r"batch: .*cpu:1, but FSDP's"):
            program.train_step(program.state, jnp.asarray(BATCH))
        with jax.set_mesh(None):
            program.fsdp.model(program.state)
    assert float(metrics["loss"]) == alone["train"][0]


@pytest.mark.quick("Explicit")
@pytest.mark.parametrize("own", KINDS)
def test_states_are_born_the_same_within_any_mesh(program, own):
    context = {"Auto": ("own", "Explicit"), "Explicit": ("other axes", "Auto")}[own]
    with jax.set_mesh(mesh_of(*context)):
        fsdp = jshard.FSDP(mesh_of("own", own), program.fsdp.policy)
        state = fsdp.init(Net, TX)
        abstract = fsdp.abstract_state(Net, TX)
    assert same(fsdp.fetch(state.params), fsdp.fetch(program.state.params))
    places = jax.tree.map(lambda x: x.sharding, (state, abstract))
    assert places == 2 * (jax.tree.map(lambda x: x.sharding, program.state),)


@pytest.mark.quick("Explicit")
@pytest.mark.parametrize("kind", KINDS)
def test_batches_and_states_may_be_on_any_mesh_of_the_same_devices(
    program, alone, kind
):
    turned = Mesh(np.array(jax.devices()[::-1]), ("data",), axis_types=(KINDS[kind],))

    def there(x: Any) -> jax.Array:
        split = x.ndim and x.shape[0] % 8 == 0
        spec = PartitionSpec("data") if split else PartitionSpec()
        return jax.device_put(x, NamedSharding(turned, spec))

    batch, state = there(BATCH), jax.tree.map(there, program.state.copy())
    _, metrics = program.train_step(state, batch)
    assert float(metrics["loss"]) == alone["train"][0]
    means = program.eval_step(program.state, batch)
    assert means.loss.terms[0][1].total.sharding.mesh == program.fsdp.mesh


def test_a_state_that_is_on_the_mesh_costs_a_step_no_walk_over_its_paths(
    program, monkeypatch
):
    walked = []
    monkeypatch.setattr(
        jshard.sharding.settings.state,
        "taken",
        lambda tree, mesh, what: walked.append(what) or tree,
    )
    program.eval_step(program.state, program.fsdp.shard_batch(BATCH))
    assert walked == ["batch"]


def test_steps_are_lowered_and_traced_within_any_mesh(program):
    with jax.set_mesh(mesh_of("other axes", "Explicit")):
        batch = program.fsdp.shard_batch(BATCH)
        assert batch.sharding.spec == PartitionSpec(("data", "model"))
        traced = program.eval_step.trace(program.abstract, batch)
        with pytest.raises(jshard.UserError, match=r"of Explicit axes .* outside"):
            jax.eval_shape(program.eval_step, program.state, batch)
    assert "shard_map" in str(traced.jaxpr)


def test_an_array_of_explicit_axes_that_nobody_passed_is_refused_in_one_line(program):
    with jax.set_mesh(mesh_of("own", "Explicit")):
        weights = jnp.ones(5)
        step = program.fsdp.eval_step(
            lambda m, batch: jshard.Mean((m(batch) * weights).sum(), len(batch))
        )
        with pytest.raises(jshard.UserError, match="neither in the state nor"):
            step(program.state, BATCH)


@pytest.mark.parametrize(
    "layer",
    [
        lambda m, x: m.unit(x, out_sharding=PartitionSpec("data")),
        lambda m, x: m.unit(x, out_sharding=PartitionSpec("fsdp")),
        lambda m, x: jax.sharding.reshard(m.unit(x), PartitionSpec(None, "model")),
        lambda m, x: jax.lax.with_sharding_constraint(x, PartitionSpec("data")),
    ],
    ids=["absent", "manual", "reshard", "constraint"],
)
def test_a_sharding_within_a_step_is_one_line_that_names_the_users(program, layer):
    step = program.fsdp.eval_step(
        lambda m, batch: jshard.Mean(layer(m, batch).sum(), len(batch))
    )
    with pytest.raises(
        jshard.UserError, match=r"test_callers_mesh.py:\d+ .*leave that out \(JAX: "
    ):
        step(program.state, BATCH)


@pytest.mark.slow  # test_mesh.py has annotated parameters
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_annotated_for_eager_sharding_trains_as_without_annotations(kind):
    def make(rngs: nnx.Rngs, *, names: bool = True) -> nnx.Module:
        init = nnx.initializers.lecun_normal()
        split = nnx.with_partitioning(init, (None, "model")) if names else init
        linear = nnx.Linear(12, 8, kernel_init=split, rngs=rngs)
        return nnx.Sequential(jshard.Unit(linear))

    fsdp = jshard.FSDP(jshard.make_mesh(replica=2), jshard.Policy(min_shard_elements=0))
    tx = optax.sgd(0.1)
    step = fsdp.train_step(loss_fn, tx)
    with jax.set_mesh(mesh_of("other axes", kind)):
        eager = make(nnx.Rngs(jax.random.key(0)))
        (kernel, _) = jax.tree.leaves(nnx.state(eager, nnx.Param))[::-1]
        assert kernel.sharding.spec == PartitionSpec(None, "model")
        states = [fsdp.init(make, tx), fsdp.from_model(eager, tx)]
        losses = [float(step(state, BATCH)[1]["loss"]) for state in states]
    plain = fsdp.from_model(make(nnx.Rngs(jax.random.key(0)), names=False), tx)
    assert losses == 2 * [float(step(plain, BATCH)[1]["loss"])]


def test_axes_of_an_abstract_mesh_may_be_explicit():
    abstract = mesh_of("own", "Explicit").abstract_mesh
    assert jshard.FSDP(abstract).mesh.axis_types == (AxisType.Auto,) * 2


@pytest.mark.slow
def test_the_table_of_meshes_and_contexts_is_what_happens_now(tmp_path):
    assert table(tmp_path) in FIGURES.read_text(), table(tmp_path / "again")


def test_the_table_has_every_mesh_and_context():
    text = FIGURES.read_text().partition("## Meshes that the caller has set")[2]
    rows = re.findall(r"^\| (?:Auto|Explicit) .*$", text, re.MULTILINE)
    assert len(rows) == len(KINDS) * (1 + len(CONTEXTS) * len(KINDS))
    assert all(row.count("|") == len(FUNCTIONS) + 3 for row in rows)
