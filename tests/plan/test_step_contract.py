"""`jshard.testing.assert_plan`: what a step sends and needs is what a contract says."""

import functools
import json
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jshard
from jshard.plan import hlo
from jshard.plan.memory.breakdown import Memory, Part
from jshard.plan.planning import Plan
from jshard.plan.step_contract import UPDATE
from jshard.system.errors import UserError
from jshard.testing import assert_plan


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(64, 256, rngs=rngs)
        self.down = nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x):
        for _ in range(4):
            x = x + self.down(jnp.tanh(self.up(x)))
        return x


def make_model(rngs):
    return nnx.Sequential(*[Block(rngs) for _ in range(2)])


def loss_fn(model, batch):
    return jshard.Mean(jnp.sum(jnp.square(model(batch))), batch.size)


POLICIES = {
    "full": jshard.Policy(remat="full"),
    "kept": jshard.Policy(remat="full", reshard_after_forward=False),
    "no remat": jshard.Policy(remat="none"),
}


@functools.cache
def trained(policy: str) -> jax.stages.Compiled:
    fsdp = jshard.FSDP(jshard.make_mesh(), POLICIES[policy], units=(Block,))
    optimizer = optax.sgd(0.1)
    state = fsdp.abstract_state(make_model, optimizer)
    batch = fsdp.shard_batch(np.ones((64, 64), np.float32))
    return fsdp.train_step(loss_fn, optimizer).lower(state, batch).compile()


@functools.cache
def plain(wire: str = "int8", donates: bool = True) -> jax.stages.Compiled:
    """A function that jshard has no part in, of abstract arguments."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    spec = PartitionSpec("data")

    def local(x):
        whole = jax.lax.all_gather(x.astype(wire), "data", tiled=True)
        return x + whole.sum().astype(x.dtype)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    step = jax.jit(mapped, donate_argnums=0 if donates else ())
    sharding = NamedSharding(mesh, spec)
    x = jax.ShapeDtypeStruct((4096, 8), np.float32, sharding=sharding)
    return step.lower(x).compile()


@pytest.fixture
def contract(tmp_path, monkeypatch):
    """Writes the contract of a step, and returns what another one is told."""

    def told(before: jax.stages.Compiled, after: jax.stages.Compiled) -> str:
        path = tmp_path / "contracts" / "step.json"
        with monkeypatch.context() as patch:
            patch.setenv(UPDATE, "1")
            assert_plan(before, path)
        assert_plan(before, path)
        with pytest.raises(AssertionError) as raised:
            assert_plan(after, path)
        return str(raised.value)

    return told


def test_a_gather_that_appears_is_named_with_where_it_comes_from(contract):
    said = contract(trained("kept"), trained("full"))
    assert (
        "- all-gather f32 over 8 devices: 4 -> 8 per step, 224.0 KiB -> 448.0 KiB"
        in said
    )
    assert "    shard_map/transpose(jvp())/all-gather/all_gather" in said, said
    assert ": 0 -> 4" in said


def test_a_kept_gathered_weight_is_a_missing_gather_and_more_memory(contract):
    said = contract(trained("full"), trained("kept"))
    assert "all_gather: 4 -> 0" in said
    assert "- memory per device, values of the forward: " in said
    assert "2 x f32[64,256] (64.0 KiB) of all-gather/all_gather" in said


def test_lost_rematerialization_is_more_memory_with_the_same_collectives(contract):
    said = contract(trained("full"), trained("no remat"))
    assert re.search(r"- memory per device, values of the forward: .* of .*tanh", said)
    assert "devices" not in said


def test_another_dtype_on_the_wire_is_named_with_the_line_that_sends_it(contract):
    limit = jax.config.jax_traceback_in_locations_limit  # pyright: ignore[reportAttributeAccessIssue]
    try:
        jax.config.update("jax_traceback_in_locations_limit", 10)  # JAX's own default
        sent = plain.__wrapped__("float32")
    finally:
        jax.config.update("jax_traceback_in_locations_limit", limit)
    said = contract(plain(), sent)
    assert "- all-gather f32 over 8 devices: 0 -> 1 per step, 0 B -> 112.0 KiB" in said
    assert "- all-gather s8 over 8 devices: 1 -> 0 per step, 28.0 KiB -> 0 B" in said
    assert re.search(r"all_gather \(test_step_contract\.py:\d+\): 0 -> 1", said)


def test_a_lost_donation_is_named(contract):
    said = contract(plain(), plain(donates=False))
    assert "- donated arguments of x, whose memory results take over: 1 -> 0" in said
    assert said.endswith(
        "If that is intended, write it again with JSHARD_UPDATE_CONTRACTS=1."
    )


def test_less_memory_and_what_the_tolerance_allows_pass(tmp_path, monkeypatch):
    path = tmp_path / "step.json"
    monkeypatch.setenv(UPDATE, "1")
    assert_plan(plain(), path)
    monkeypatch.setenv(UPDATE, "0")
    for factor, right in ((1.5, True), (0.99, True), (0.9, False)):
        facts = json.loads(path.read_text())
        facts["memory"] = {k: factor * v for k, v in facts["memory"].items()}
        other = tmp_path / "other.json"
        other.write_text(json.dumps(facts))
        if right:
            assert_plan(plain(), other)
        else:
            with pytest.raises(AssertionError, match="memory per device, total"):
                assert_plan(plain(), other)


def planned(saved: int, seconds: float | None) -> Plan:
    """A recipe's plan on two devices, with what a contract reads of one."""
    text = (
        "HloModule step, is_scheduled=true\n\n"
        "ENTRY %main (x: f32[4]) -> f32[8] {\n"
        "  %x = f32[4]{0} parameter(0)\n"
        "  ROOT %all = f32[8]{0} all-gather(%x), replica_groups={{0,1}}, "
        'dimensions={0}, metadata={op_name="jit(step)/gather"}\n}\n'
    )
    part = Part("saved activations", saved, "remat full")
    memory = Memory((part,), 1000 + saved, 0, None, (), 2)
    timeline: Any = seconds and SimpleNamespace(seconds=seconds, stage=0)
    nothing: Any = None
    return Plan(
        name="step", about="", topology="", gpu=None, devices=2, device_kind="cpu",
        text=text, module=hlo.parse(text), memory=memory, traffic=nothing,
        timeline=timeline,
    )  # fmt: skip


def test_a_plan_is_held_to_its_memory_by_part_and_to_its_predicted_time(contract):
    said = contract(planned(1000, 0.8), planned(4000, 0.9))
    assert "- memory per device, saved activations: 1000 B -> 3.9 KiB" in said
    assert "- memory per device, total: 2.0 KiB -> 4.9 KiB" in said
    assert "- predicted step: 800.0 ms -> 900.0 ms" in said
    assert "all-gather" not in said


def test_a_plan_may_be_a_little_slower_and_much_faster(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv(UPDATE, "1")
        assert_plan(planned(1000, 0.8), tmp_path / "step.json")
    for seconds in (0.81, 0.1, None):
        assert_plan(planned(1000, seconds), tmp_path / "step.json")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            None,
            "there is no such contract; write it with JSHARD_UPDATE_CONTRACTS=1",
        ),
        ("{", "is no contract"),
        ("[]", "is no contract"),
        ('{"format": 2}', "is no contract"),
    ],
)
def test_a_missing_or_damaged_contract_is_one_line(tmp_path, content, problem):
    path = tmp_path / "step.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=f"^{re.escape(str(path))}: {problem}"):
        assert_plan(plain(), path)


def test_a_contract_of_other_devices_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "step.json"
    monkeypatch.setenv(UPDATE, "1")
    assert_plan(plain(), path)
    monkeypatch.delenv(UPDATE)
    path.write_text(path.read_text().replace("8 x cpu", "64 x NVIDIA H100"))
    with pytest.raises(UserError, match="is of 64 x NVIDIA H100, and the step"):
        assert_plan(plain(), path)


def test_what_is_not_compiled_is_refused(tmp_path):
    with pytest.raises(UserError, match="step is a function: give a plan, or what jax"):
        assert_plan(make_model, tmp_path)  # pyright: ignore[reportArgumentType]
