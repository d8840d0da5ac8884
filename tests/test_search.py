"""A search lists, rules out, compiles, and finds what no other candidate beats."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from ml_collections import ConfigDict

import jshard
from decoder import Sizes, loss_fn, make_decoder
from jshard.mesh import BATCH
from jshard.plan import cache as caching
from jshard.plan import has_plugin
from jshard.plan.arithmetic import Estimate, memory_bound, state_size
from jshard.plan.cache import Cache
from jshard.plan.candidates import (
    CHANGING_KNOBS,
    DEFAULT_KNOBS,
    Candidate,
    candidates,
    parse_search,
)
from jshard.plan.choosing import Choice
from jshard.plan.memory import device_total
from jshard.plan.outcomes import Outcome, pareto
from jshard.plan.search_output import run_search
from jshard.plan.workers import Workers
from jshard.training.command_line import override
from jshard.training.config import complete
from jshard.training.recipe import find_recipe

ROOT = Path(__file__).parents[1]


def config(**changes):
    made = complete(ConfigDict({"steps": 1, "batch_size": 64}), "a.py")
    override(made, {k.replace("__", "."): v for k, v in changes.items()}, "a.py")
    return made


def varied(found, key):
    return {candidate.settings.get(key) for candidate in found}


# What varies.


def test_search_alone_varies_how_the_same_training_is_done():
    assert set(parse_search(["--search"], {})) == set(DEFAULT_KNOBS)
    assert not set(DEFAULT_KNOBS) & set(CHANGING_KNOBS)


def test_keys_that_are_given_stay_as_they_are():
    fixed = {"policy.remat": "dots", "mesh.replica": "2"}
    allowed = parse_search(["--search"], fixed)
    assert set(allowed) == set(DEFAULT_KNOBS) - {"policy.remat", "mesh"}


def test_named_knobs_alone_vary_over_their_own_or_given_values():
    words = ["--search=mesh,policy.precision.reduce", "--search.policy.remat=full,dots"]
    assert parse_search(words, {}) == {
        "mesh": None,
        "policy.precision.reduce": None,
        "policy.remat": ("full", "dots"),
    }


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("--search=policy.remta", r"did you mean policy\.remat\?.*--search\.KEY=A,B"),
        ("--search=policy.offload", r"--config\.policy\.offload is given, too"),
        ("--search.policy.offload=None", r"--config\.policy\.offload is given, too"),
        ("--search.policy.remat=", "needs values"),
        ("--searches", "unknown argument"),
    ],
)
def test_what_cannot_vary_is_told(word, says):
    with pytest.raises(jshard.UserError, match=says):
        parse_search([word], {"policy.offload": "all"})


def test_a_key_that_the_recipe_lacks_is_told():
    with pytest.raises(jshard.UserError, match=r"no such key.*policy\.remat"):
        candidates(config(), 8, {"policy.remta": ("full",)})


def test_meshes_are_shards_within_a_host_or_over_whole_hosts():
    found = candidates(config(), 24, {"mesh": None})
    assert varied(found, "mesh.replica") == {None, "3", "6", "12", "24"}


def test_micro_batches_divide_the_examples_of_a_device():
    found = candidates(config(), 16, {"policy.accumulate": None})
    assert varied(found, "policy.accumulate") == {None, "2", "4"}


def test_activations_are_offloaded_by_their_names():
    found = candidates(config(), 8, {"policy.remat": None}, ["hidden", "qkv"])
    assert "offload:hidden+qkv" in varied(found, "policy.remat")


def test_of_settings_that_make_one_program_one_is_listed():
    knobs = ("policy.accumulate", "policy.defer_scatter", "mesh")
    knobs += ("policy.reshard_after_forward",)
    found = candidates(config(), 8, dict.fromkeys(knobs))
    for candidate in found:
        s = candidate.settings
        deferred = s.get("policy.defer_scatter") == "True"
        assert not deferred or "policy.accumulate" in s
        whole = deferred or s.get("mesh.replica") == "8"
        assert not whole or "policy.reshard_after_forward" not in s
    assert len(found) == len(set(found)) > 10


def test_the_config_as_given_comes_first_and_settings_are_changes_of_it():
    found = candidates(config(policy__remat="dots"), 8, {"policy.remat": None})
    assert [c.settings for c in found] == [
        {},
        {"policy.remat": "full"},
        {"policy.remat": "none"},
    ]


def test_a_command_line_has_what_the_user_gave_and_what_was_found():
    command = Candidate({"policy.remat": "dots"}).command("a b.py", {"steps": "9"})
    assert command == (
        "python -m jshard.train '--config=a b.py' --config.steps=9 "
        "--config.policy.remat=dots"
    )


# What is ruled out, and what is tried first.

policies = st.builds(
    jshard.Policy,
    remat=st.sampled_from(["full", "dots", "none"]),
    reshard_after_forward=st.sampled_from([True, False, 2]),
    accumulate=st.sampled_from([1, 2, 4]),
    defer_scatter=st.booleans(),
    min_shard_elements=st.sampled_from([0, 4096]),
    precision=st.sampled_from(
        [
            jshard.Precision(),
            jshard.Precision(compute="bfloat16", reduce="float32"),
            jshard.Precision(gather="int8", compute="float32"),
        ]
    ),
)


def steps(examples):
    """Draws a policy, replicas, layers and an optimizer."""
    drawn = given(
        policy=policies,
        replica=st.sampled_from([1, 2, 4]),
        layers=st.integers(1, 3),
        optimizer=st.sampled_from([optax.sgd(0.1), optax.adam(0.1)]),
    )
    quick = [HealthCheck.function_scoped_fixture]
    return lambda test: settings(max_examples=examples, suppress_health_check=quick)(
        drawn(test)
    )


@steps(2)
def test_no_step_needs_less_than_the_bound(
    quick_compilation, policy, replica, layers, optimizer
):
    check_bound(policy, replica, layers, optimizer)


@pytest.mark.slow
@steps(30)
def test_none_of_many_steps_needs_less_than_the_bound(
    quick_compilation, policy, replica, layers, optimizer
):
    check_bound(policy, replica, layers, optimizer)


def check_bound(policy, replica, layers, optimizer):
    mesh = jshard.make_mesh(replica=replica)
    fsdp = jshard.FSDP(mesh, policy)
    sizes = Sizes(layers=layers, width=32, hidden=256, vocab=64)
    state = fsdp.abstract_state(make_decoder(sizes), optimizer)
    tokens = jax.ShapeDtypeStruct(
        (32, sizes.length), jnp.int32, sharding=NamedSharding(mesh, BATCH)
    )
    step = fsdp.train_step(loss_fn, optimizer)
    compiled = step.lower(state, {"tokens": tokens, "targets": tokens}).compile()
    bound = memory_bound(state_size(state), policy)
    assert 0 < bound <= device_total(compiled)


def outcome(rate, memory, **changes):
    fields = {"rate": rate, "memory": memory, "usable": 100, **changes}
    return Outcome(Candidate({"policy.remat": f"{rate}-{memory}"}), **fields)


points = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 120)), max_size=30)


@given(points)
def test_the_pareto_set_is_what_no_other_beats(points):
    outcomes = [outcome(*point) for point in points]
    fitting = {p for p in points if p[1] <= 100}
    best = {
        (rate, memory)
        for rate, memory in fitting
        if not any(
            (r >= rate and m <= memory) and (r, m) != (rate, memory) for r, m in fitting
        )
    }
    found = [(o.rate, o.memory) for o in pareto(outcomes)]
    assert found == sorted(best, reverse=True)


def test_what_failed_or_does_not_fit_is_in_no_pareto_set():
    assert not pareto([outcome(9, 101), outcome(9, 0, error="no")])


def test_the_next_candidate_is_chosen_by_what_its_neighbours_turned_out_to_be():
    a, a2 = Candidate({"x": "a"}), Candidate({"x": "a", "y": "2"})
    b = Candidate({"x": "b"})
    choice = Choice(
        {Candidate({}): Estimate(4, 50), a: Estimate(1, 50), a2: Estimate(1, 49.9),
         b: Estimate(1.5, 50)},
        100,
    )  # fmt: skip
    order = choice.first(4)
    assert next(order) == Candidate({})  # as given
    choice.learn(Outcome(Candidate({}), seconds=4, memory=50))
    assert next(order) == a2
    choice.learn(Outcome(a2, seconds=10, memory=50))  # ten times what was estimated
    assert next(order) == b
    assert next(order) == a
    assert not list(order)
    assert not choice.left


# The cache.


def test_results_are_kept_and_damaged_ones_made_anew(tmp_path):
    cache = Cache(tmp_path / "plan")
    assert cache.read("k") is None
    cache.write("k", {"seconds": 1.5})
    assert cache.read("k") == {"seconds": 1.5}
    file = tmp_path / "plan" / "k.json"
    for damage in ("", "{", '{"key": "other", "result": {}}', '{"key": "k"}', "[]"):
        file.write_text(damage)
        with pytest.warns(UserWarning, match="ignored, and made anew"):
            assert cache.read("k") is None


def test_a_cache_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "plan").write_text("a file")
    with pytest.warns(UserWarning, match="not kept: cannot write"):
        Cache(tmp_path / "plan").write("k", {})


def test_the_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("JSHARD_CACHE", str(tmp_path))
    assert caching.default_folder() == tmp_path / "plan"


# Processes.

WORKER = """\
import json, os, subprocess, sys, time
for line in sys.stdin:
    task = json.loads(line)
    if "die" in task:
        print("Fatal: told to", file=sys.stderr, flush=True)
        os.abort()
    if "sleep" in task:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
        open(task["sleep"], "a").write(f"{os.getpid()} {child.pid} ")
        time.sleep(99)
    print(json.dumps({"pid": os.getpid(), **task}), flush=True)
"""
COMMAND = [sys.executable, "-S", "-c", WORKER]


def results(tasks, timeout=60.0):
    options = {"processes": 2, "timeout": timeout, "environment": dict(os.environ)}
    with Workers(COMMAND, **options) as workers:
        return dict(workers.run(tasks))


def is_running(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def test_each_process_does_many_tasks():
    found = results([{"n": n} for n in range(7)])
    assert [found[n]["n"] for n in range(7)] == list(range(7))
    assert len({reply["pid"] for reply in found.values()}) <= 2


def test_a_process_that_dies_costs_its_task_only():
    found = results([{"n": 0}, {"die": 1}, {"n": 2}, {"die": 1}, {"n": 4}])
    assert [n for n, reply in found.items() if "error" in reply] in ([1, 3], [3, 1])
    assert found[1]["error"].endswith("died by SIGABRT: Fatal: told to")
    assert [found[n]["n"] for n in (0, 2, 4)] == [0, 2, 4]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_task_that_takes_too_long_is_given_up_with_all_it_started(tmp_path):
    pids = tmp_path / "pids"
    found = results([{"sleep": str(pids)}, {"n": 1}], timeout=1.0)
    assert found[0]["error"] == "took longer than 1 s"
    assert found[1]["n"] == 1
    wait_for(lambda: not any(map(is_running, pids.read_text().split())))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_leaves_no_process_behind(tmp_path):
    pids = tmp_path / "pids"
    pids.touch()
    script = f"""
        import os
        from jshard.plan.workers import Workers
        tasks = [{{"sleep": {str(pids)!r}}}] * 2
        options = dict(processes=2, timeout=60, environment=dict(os.environ))
        with Workers({COMMAND!r}, **options) as workers:
            list(workers.run(tasks))
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: len(pids.read_text().split()) == 4)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert "KeyboardInterrupt" in errors
    wait_for(lambda: not any(map(is_running, pids.read_text().split())))


# All of it.

RECIPE = """\
import os

from train import gpt

make_optimizer = gpt.make_optimizer
loss_fn = gpt.loss_fn
make_data = gpt.make_data


def get_config():
    config = gpt.get_config()
    config.model.num_layers = 2
    config.model.width = 64
    config.model.num_heads = 2
    config.batch_size = 16
    return config


def make_model(config, rngs):
    if config.policy.remat == "none" and config.policy.accumulate == 2:
        os.abort()
    return gpt.make_model(config, rngs)
"""

h100 = [
    pytest.mark.h100,
    pytest.mark.skipif(not has_plugin(), reason="pip install 'jshard[plan]'"),
]


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """The first and the second search of a recipe one of whose candidates aborts."""
    folder = tmp_path_factory.mktemp("search")
    (folder / "data").mkdir()
    (folder / "data" / "text.txt").write_text("to be or not to be " * 5000)
    file = folder / "tiny.py"
    file.write_text(RECIPE)
    given = {"data.path": str(folder / "data" / "text.txt")}
    words = ["--search.policy.remat=full,none", "--search=policy.accumulate"]
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JSHARD_CACHE", str(folder / "cache"))
        for n in range(2):
            with (folder / f"out{n}").open("w") as out:
                allowed = parse_search(words, given)
                code, search = run_search(
                    "tiny.py", file, given, "h100:8", allowed, out=out
                )
            found.append((code, search, (folder / f"out{n}").read_text()))
    return found


class TestSearch:
    pytestmark = h100

    def test_it_finds_what_fits_with_its_command_lines(self, searched):
        code, found, text = searched[0]
        assert code == 0
        assert found.considered == len(found.outcomes) == 4
        assert found.best
        for best in found.best:
            assert best.rate > 0
            assert 0 < best.memory < found.usable
            command = best.candidate.command("tiny.py", {})
            assert command.removeprefix("python -m jshard.train") in text.replace(
                f" --config.data.path={_path(text)}", ""
            )

    def test_a_candidate_that_aborts_is_told_and_the_others_go_on(self, searched):
        _, found, text = searched[0]
        failed = {str(o.candidate): o.error for o in found.failed}
        assert set(failed) == {"accumulate=2 remat=none"}
        assert all("SIGABRT" in error for error in failed.values())
        assert "1 failed" in text

    def test_again_nothing_is_compiled(self, searched):
        first, again = (search for _, search, _ in searched)
        assert not any(o.cached for o in first.outcomes)
        assert all(o.cached for o in again.outcomes if not o.error)
        assert [(o.candidate, o.seconds) for o in again.best] == [
            (o.candidate, o.seconds) for o in first.best
        ]

    def test_it_is_json(self, searched):
        data = json.loads(json.dumps(searched[0][1].as_dict()))
        assert data["pareto"][0]["candidate"]["settings"] is not None
        assert len(data["outcomes"]) == 4


def _path(text):
    return text.split("--config.data.path=")[1].split()[0]


@pytest.mark.h100
@pytest.mark.skipif(not has_plugin(), reason="pip install 'jshard[plan]'")
def test_where_nothing_fits_the_closest_is_named_with_exit_code_3(tmp_path, capsys):
    given = {
        "policy.offload": "None",
        "policy.accumulate": "1",
        "policy.defer_scatter": "False",
        "policy.remat": "full",
    }
    code, found = run_search(
        "llama3_70b.py",
        find_recipe("llama3_70b.py"),
        given,
        "h100:8",
        parse_search(["--search"], given),
    )
    text = capsys.readouterr().out
    assert code == 3
    assert not found.outcomes
    assert len(found.too_large) == found.considered
    assert "The closest needs at least" in text
    assert "--search of more: policy.remat" in text
