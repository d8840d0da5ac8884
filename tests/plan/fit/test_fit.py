"""Remat and micro-batches that are chosen by the memory: `policy.remat=fit`."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import pytest

import jshard
from jshard.plan.fit import fitted as fitted_job
from jshard.plan.fit.device_memory import (
    compiled_bytes,
    step_bytes,
    usable_bytes,
)
from jshard.plan.fit.fitted import make_fitted_job
from jshard.plan.fit.memory_choice import Candidate, Traced, candidates, fit
from jshard.plan.planning import plan_recipe
from jshard.recipe.build import abstract_batch, make_job, make_mesh
from jshard.recipe.config.overrides import override
from jshard.recipe.config.run_config import check, complete
from jshard.recipe.configured import configure
from jshard.recipe.load import find_recipe, open_recipe
from jshard.sharding.layout.capacity import state_bytes
from jshard.system.jobs.peers import Peers
from jshard.training.trainer import Trainer, fit_since
from tiny_runs import read_metrics

SMALL = {
    "steps": 4,
    "log_every": 1,
    "eval_every": 0,
    "checkpoint.every": 2,
    "batch_size": 16,
    "data.path": __file__,  # the default is more text, which takes longer to encode
    "sample.length": 0,
    "model.num_layers": 2,
    "model.width": 64,
    "model.sequence_length": 256,
    "model.loss_chunk": 256,
    "policy.remat": "fit",
    "policy.accumulate": "fit",
    "mesh.fsdp": 2,
}
ENOUGH, SCARCE = 2**40, 7 * 2**20


@pytest.fixture
def recipe():
    with open_recipe(find_recipe("gpt.py")) as recipe:
        yield recipe


@pytest.fixture
def memory(monkeypatch):
    """Sets the bytes that a step may use on a device."""

    def limit(usable):
        from jshard.plan import planning

        for module in (fitted_job, planning):
            monkeypatch.setattr(module, "usable_bytes", lambda devices: usable)

    limit(ENOUGH)
    return limit


def configured(recipe, **settings):
    config = complete(recipe.get_config(), recipe.name)
    settings = {key.replace("__", "."): value for key, value in settings.items()}
    override(config, SMALL | settings, recipe.name)
    check(config)
    return configure(recipe, config)


TRACED: dict[str, Traced] = {}  # what the same config gave before
FEW = {"batch_size": 4}  # so that there are one or two micro-batches, traced once


def pick(recipe, usable, **settings):
    """What is chosen if XLA needs as much as estimated, and what was compiled."""
    made, compiled = configured(recipe, **settings), []
    mesh = make_mesh(made.settings.mesh)

    def trace(candidate):
        chosen = candidate.apply(made)
        if (key := chosen.config.to_json()) not in TRACED:
            job = make_job(chosen, mesh)
            state = job.abstract_state()
            batch, _, _ = abstract_batch(chosen, mesh)
            jaxpr = job.train_step.trace(state, batch).jaxpr.jaxpr
            micro_batches, axes = candidate.accumulate, dict(mesh.shape)
            TRACED[key] = Traced(jaxpr, state, micro_batches, axes, {})
        return TRACED[key]

    def compile(candidate):
        compiled.append(candidate)
        traced = trace(candidate)
        return state_bytes(traced.state) + step_bytes(traced.jaxpr), None

    return fit(made.settings, mesh.size, usable, trace, compile), compiled


def choose(recipe, workdir, **settings):
    made = configured(recipe, **settings)
    mesh = make_mesh(made.settings.mesh)
    return make_fitted_job(made, mesh, None, workdir, Peers())


def chosen(job: Any) -> tuple[str, int]:
    policy = job.configured.settings.policy
    return policy.remat, policy.accumulate


def test_with_enough_memory_nothing_is_recomputed_nor_split(recipe):
    found, compiled = pick(recipe, ENOUGH, **FEW)
    assert compiled == [found.choice] == [Candidate("none", 1)]
    assert re.fullmatch(r"remat none, 1 micro-batch: .* of 1.0 TiB .*", found.note)


@pytest.mark.slow
def test_the_less_memory_the_more_is_recomputed_or_split(recipe):
    seen = []
    for mebibytes in (16, 6):
        found, compiled = pick(recipe, mebibytes * 2**20)
        assert compiled == [found.choice]  # an estimate was enough
        assert "; " in found.note
        assert "would need about " in found.note
        seen.append(found.choice)
    assert len(set(seen)) == 2
    assert seen[0].accumulate < seen[1].accumulate


@pytest.mark.slow
def test_with_little_memory_the_note_says_what_the_faster_choice_needs(
    recipe, memory, tmp_path, request
):
    memory(SCARCE)
    job, note = choose(recipe, tmp_path, policy__remat="full")
    _, micro_batches = chosen(job)
    assert micro_batches > 1
    assert note.startswith(f"remat full, {micro_batches} micro-batches")
    assert " of 7.0 MiB per device; with " in note
    assert " would need " in note
    # The figure is that of the program that runs, which is compiled no second time.
    compiled = []
    compiling = "/jax/core/compile/backend_compile_duration"

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        compiled.extend([event] if event == compiling else [])

    jax.monitoring.register_event_duration_secs_listener(listen)
    request.addfinalizer(
        lambda: jax.monitoring.unregister_event_duration_listener(listen)
    )
    batch, _, _ = abstract_batch(job.configured, job.fsdp.mesh)
    state = job.abstract_state()
    step = job.train_step.trace(state, batch).lower().compile()
    assert not compiled
    assert compiled_bytes(step) <= SCARCE
    state = job.fsdp.init(job.make_model, job.optimizer)
    zeros = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), batch)
    batch = job.fsdp.shard_batch(jax.device_get(zeros))
    compiled.clear()
    job.train_step(state, batch)
    assert not compiled
    jax.jit(lambda x: x + 1)(1.5)
    assert compiled  # the event is still named so


@pytest.mark.quick("accumulate")
@pytest.mark.parametrize(("key", "value"), [("accumulate", 2), ("remat", "full")])
def test_a_key_that_is_given_stays(recipe, key, value):
    found, _ = pick(recipe, ENOUGH, **FEW, **{f"policy__{key}": value})
    assert getattr(found.choice, key) == value
    assert "fit" not in (found.choice.remat, found.choice.accumulate)


def test_a_config_without_open_keys_is_left_alone(recipe, tmp_path):
    job, note = choose(recipe, tmp_path, policy__remat="dots", policy__accumulate=2)
    assert (chosen(job), note) == (("dots", 2), "")


@pytest.mark.slow
def test_the_plan_chooses_like_the_trainer(recipe, memory, tmp_path):
    memory(SCARCE)
    job, _ = choose(recipe, tmp_path)
    plan = plan_recipe(configured(recipe), "attached")
    assert chosen(plan.program.job) == chosen(job)
    assert str(Candidate(*chosen(job))) in plan.chosen


def test_if_nothing_fits_one_line_says_what_the_most_frugal_choice_needs(recipe):
    with pytest.raises(jshard.UserError) as error:
        pick(recipe, 2**21, **FEW, policy__remat="none")
    said = str(error.value)
    assert said.startswith("--config.policy.accumulate=fit: even with remat none, 2 ")
    assert "of the 2.0 MiB that a device has; use more devices" in said
    assert "\n" not in said
    with pytest.raises(jshard.UserError, match="=fit: the state alone needs 1"):
        pick(recipe, 2**10, **FEW, policy__remat="none")
    both = "^--config.policy.remat=fit --config.policy.accumulate=fit: the state alone"
    with pytest.raises(jshard.UserError, match=both):
        pick(recipe, 2**10, **FEW)


def test_unresolved_keys_are_no_policy(recipe):
    made = configured(recipe)
    with pytest.raises(jshard.UserError, match="fit"):
        make_job(made, make_mesh(made.settings.mesh))


def test_micro_batches_divide_the_examples_of_a_device(recipe):
    made = configured(recipe, batch_size=96, policy__remat="names:qkv")
    found = candidates(made.settings, 24)
    assert [(x.remat, x.accumulate) for x in found] == [
        ("names:qkv", 1), ("names:qkv", 2), ("names:qkv", 4),
    ]  # fmt: skip


def train(recipe, workdir: Path, **settings) -> list[dict]:
    config = configured(recipe, **settings).config
    trainer = Trainer(recipe, config=config, workdir=workdir)
    fit_since(trainer, keeps_state=False)
    return [
        {k: x[k] for k in ("step", "loss", "grad_norm")}
        for x in read_metrics(workdir)
        if "loss" in x
    ]


@pytest.mark.slow
def test_a_resumed_run_keeps_its_choice_bit_for_bit(recipe, memory, tmp_path, capsys):
    folder = tmp_path / "run"
    memory(SCARCE)
    whole = train(recipe, folder)
    config = json.loads((folder / "config.json").read_text())
    first = config["policy"]["remat"], config["policy"]["accumulate"]
    assert first != ("none", 1)
    assert config["fitted_on"] == "2 x cpu: replica 1 x fsdp 2"
    notes = json.loads((folder / "notes.json").read_text())
    assert f"memory          remat {first[0]}, {first[1]} micro-" in notes["start_up"]

    memory(ENOUGH)
    shutil.rmtree(folder / "checkpoints" / "4")
    capsys.readouterr()
    assert train(recipe, folder) == whole
    said = capsys.readouterr().out
    assert "resuming" in said
    assert "as this run chose when it began" in said
    assert "policy." not in said  # no key changed

    # On another mesh it chooses again, and says what changed.
    train(recipe, folder, steps=5, mesh__fsdp=4)
    said = capsys.readouterr().out
    assert f"policy.accumulate {first[1]} -> 1" in said
    assert "remat none, 1 micro-batch: " in said


def test_cpu_devices_share_the_memory_of_the_machine():
    one, four = usable_bytes(jax.devices()[:1]), usable_bytes(jax.devices()[:4])
    assert four == one // 4 > 0
