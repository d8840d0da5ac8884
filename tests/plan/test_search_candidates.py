"""What a search varies, rules out by arithmetic, and tries first."""

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding
from ml_collections import ConfigDict

import jshard
from decoder import Sizes, loss_fn, make_decoder
from jshard.plan.fit.device_memory import compiled_bytes
from jshard.plan.fit.hardware import GPUS, STATED
from jshard.plan.search.candidates import (
    CHANGING_KNOBS,
    DEFAULT_KNOBS,
    Candidate,
    candidates,
    parse_search,
)
from jshard.plan.search.estimates import (
    Activity,
    Estimate,
    StateSize,
    estimate,
    memory_bound,
    of_stage,
    ranked,
    state_size,
)
from jshard.plan.search.outcomes import Outcome, pareto
from jshard.plan.search.traces import Traces
from jshard.plan.topology import parse
from jshard.recipe.build import make_job, make_mesh
from jshard.recipe.config.overrides import override
from jshard.recipe.config.run_config import complete, flatten
from jshard.recipe.configured import configure
from jshard.recipe.load import open_recipe
from jshard.recipe.make_config import make_config
from jshard.recipe.recipe_path import find_recipe
from jshard.sharding.settings.mesh import AXES, BATCH


def config(**changes):
    made = complete(ConfigDict({"steps": 1, "batch_size": 64}), "a.py")
    override(made, {k.replace("__", "."): v for k, v in changes.items()}, "a.py")
    return flatten(made)


def varied(found, key):
    return {candidate.settings.get(key) for candidate in found}


# What varies.


def test_search_alone_varies_how_the_same_training_is_done():
    assert set(parse_search([""], {}, ())) == set(DEFAULT_KNOBS)
    assert not set(DEFAULT_KNOBS) & set(CHANGING_KNOBS)


def test_keys_that_are_given_stay_as_they_are():
    fixed = {"policy.remat": "dots", "mesh.replica": 2}
    allowed = parse_search([""], {}, fixed)
    assert set(allowed) == set(DEFAULT_KNOBS) - {"policy.remat", "mesh"}


def test_named_knobs_alone_vary_over_their_own_or_given_values():
    listed = {"policy.remat": ("full", "dots")}
    assert parse_search(["mesh,policy.precision.reduce"], listed, ()) == {
        "mesh": None,
        "policy.precision.reduce": None,
        "policy.remat": ("full", "dots"),
    }


@pytest.mark.parametrize(
    ("searches", "listed", "says"),
    [
        (["policy.remta"], {}, r"did you mean policy\.remat\?.*--search\.KEY=A,B"),
        (["policy.offload"], {}, r"--config\.policy\.offload is given, too"),
        ([], {"policy.offload": (None,)}, r"--config\.policy\.offload is given, too"),
        ([], {"policy.remat": ()}, "needs values"),
    ],
)
def test_what_cannot_vary_is_told(searches, listed, says):
    with pytest.raises(jshard.UserError, match=says):
        parse_search(searches, listed, {"policy.offload"})


def test_meshes_are_shards_within_a_host_or_over_whole_hosts():
    found = candidates(config(), *parse("h100:24"), {"mesh": None})
    assert varied(found, "mesh.replica") == {None, 3, 6, 12, 24}
    found = candidates(config(), *parse("h100:6"), {"mesh": None})
    assert varied(found, "mesh.replica") == {None, 2, 3, 6}


def test_stages_have_micro_batches_that_keep_them_busy():
    allowed = parse_search(["mesh.pipe,policy.accumulate"], {}, ())

    def pairs(batch_size):
        found = candidates(
            config(batch_size=batch_size), GPUS["h100"], 64, allowed, axes=["pipe"]
        )
        keys = ("mesh.pipe", "policy.stages_per_device", "policy.accumulate")
        return {tuple(c.settings.get(key, 1) for key in keys) for c in found}

    # One example a device: as many micro-batches as stages. Two are busy for two thirds
    # of a step, four with twice as many stages.
    few = pairs(64)
    assert {(1, 1, 1), (2, 1, 2), (4, 2, 4)} <= few
    assert not few & {(4, 1, 4), (2, 2, 3), (1, 1, 2), (2, 1, 4)}
    many = pairs(512)
    assert {stages for stages, *_ in many} == {1, 2, 4, 8, 16}
    assert max(micro for stages, _, micro in many if stages == 1) == 8
    assert {micro for stages, v, micro in many if (stages, v) == (16, 1)} == {
        32,
        64,
        128,
    }


def test_a_stage_holds_its_part_of_the_layers():
    whole = StateSize(100, 0, 1000, 800, 10, 4000, 500)
    assert of_stage(whole, 1) == whole
    assert of_stage(whole, 4)[2:6] == (400, 200, 10, 1600)


def test_a_rack_takes_axes_as_a_host_does():
    """Of 128 GB200s, each 64 are joined by NVLink."""
    near = (None, 2, 4, 8, 16, 32, 64)
    two = parse("gb200:128")
    found = candidates(config(), *two, {"mesh": None})
    assert varied(found, "mesh.replica") == {*near, 128}
    knobs = {"policy.reshard_after_forward": None, "axes": None}
    found = candidates(config(), *two, knobs, axes=["tensor"])
    assert varied(found, "policy.reshard_after_forward") == {None, False, 64}
    assert varied(found, "mesh.tensor") == set(near)
    hosts = {"policy.reshard_after_forward": [4], "mesh.replica": ["hosts"]}
    assert len(candidates(config(), *two, hosts)) == 2  # shards within four GPUs


def test_micro_batches_divide_the_examples_of_a_device():
    found = candidates(config(), *parse("h100:16"), {"policy.accumulate": None})
    assert varied(found, "policy.accumulate") == {None, 2, 4}


def test_activations_are_offloaded_by_their_names():
    found = candidates(
        config(), *parse("h100:8"), {"policy.remat": None}, ["hidden", "qkv"]
    )
    assert "offload:hidden+qkv" in varied(found, "policy.remat")


def test_of_settings_that_make_one_program_one_is_listed():
    knobs = ("policy.accumulate", "policy.defer_scatter", "mesh")
    knobs += ("policy.reshard_after_forward",)
    found = candidates(config(), *parse("h100:8"), dict.fromkeys(knobs))
    for candidate in found:
        s = candidate.settings
        deferred = s.get("policy.defer_scatter") is True
        assert not deferred or "policy.accumulate" in s
        whole = deferred or s.get("mesh.replica") == 8
        assert not whole or "policy.reshard_after_forward" not in s
    assert len(found) == len(set(found)) > 10


def test_the_config_as_given_comes_first_and_settings_are_changes_of_it():
    found = candidates(
        config(policy__remat="dots"), *parse("h100:8"), {"policy.remat": None}
    )
    assert [c.settings for c in found] == [
        {},
        {"policy.remat": "full"},
        {"policy.remat": "attention"},
        {"policy.remat": "none"},
    ]


def test_a_command_line_has_what_the_user_gave_and_what_was_found():
    command = Candidate({"policy.remat": "dots"}).command("a b.py", {"steps": 9})
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


@steps(1)
def test_no_step_needs_less_than_the_bound(policy, replica, layers, optimizer):
    check_bound(policy, replica, layers, optimizer)


@pytest.mark.slow
@steps(30)
def test_none_of_many_steps_needs_less_than_the_bound(
    policy, replica, layers, optimizer
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
    assert 0 < bound <= compiled_bytes(compiled)


def test_a_candidates_policy_mesh_and_size_are_those_of_its_own_job():
    tiny = {"model.num_layers": 2, "model.width": 32, "batch_size": 16}
    varied = (
        {},
        {"mesh.replica": 2, "policy.accumulate": 2},
        {"mesh.tensor": 2, "policy.remat": "dots"},
        {"mesh.replica": 4, "policy.defer_scatter": True, "policy.accumulate": 2},
        {"batch_size": 32, "policy.precision.reduce": "bfloat16"},
    )
    with open_recipe(find_recipe("gpt.py")) as recipe:
        traces = Traces(recipe, tiny)
        for more in varied:
            sized = traces.sized(Candidate(more), "cpu:8", jax.devices())
            alone = configure(recipe, make_config(recipe, tiny | more))
            mesh = make_mesh(alone.settings.mesh, jax.devices())
            state = make_job(alone, mesh.abstract_mesh).abstract_state()
            assert sized == (
                alone.settings.batch_size, alone.policy, mesh, state_size(state),
            )  # fmt: skip
        for _ in range(2):  # once made, once remembered
            with pytest.raises(jshard.UserError, match="3"):
                traces.sized(Candidate({"mesh.fsdp": 3}), "cpu:8", jax.devices())


@pytest.mark.parametrize("offload", [None, "optimizer", "all"])
def test_the_size_with_offload_is_that_of_the_state_made_so(offload):
    mesh = AbstractMesh((2, 4), AXES[:2])

    def state(policy: jshard.Policy):
        fsdp = jshard.FSDP(mesh, policy)
        make = make_decoder(Sizes(layers=2, width=30, hidden=64, vocab=65))
        return fsdp.abstract_state(make, optax.adam(0.1))

    small = {"ema_decay": 0.9, "min_shard_elements": 64}
    made = state(jshard.Policy(offload=offload, **small))
    assert state_size(state(jshard.Policy(**small)), offload) == state_size(made)
    assert (state_size(made).host > 0) == (offload is not None)


@pytest.mark.parametrize(
    ("gpu", "copies", "shards", "speed"),
    [
        ("h100", 8, 8, STATED.network_port),  # a copy a host
        ("h100", 8, 16, STATED.network_port),
        ("h100", 4, 4, 2 * STATED.network_port),  # two copies a host share its ports
        ("h100", 2, 4, STATED.link * GPUS["h100"].link),
        ("b300", 8, 8, 2 * STATED.network_port),  # of 800 Gb/s
        ("gb200", 2, 32, STATED.link * 900e9),  # in a rack
        ("l40s", 2, 4, STATED.link * 32e9),
    ],
)
def test_sums_over_copies_come_through_the_ports_of_the_devices_that_hold_them(
    gpu, copies, shards, speed
):
    only_shards = StateSize(0, 0, 0, 0, 0, 0, trained_shards=1 << 30)
    mesh = AbstractMesh((copies, shards), AXES[:2])
    idle = Activity(0, 0, 0)
    guess = estimate(only_shards, jshard.Policy(), mesh, GPUS[gpu], idle, 1)
    nbytes = 2 * (1 << 30) * (copies - 1) / copies
    assert guess.seconds == pytest.approx(nbytes / speed)


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


def test_those_come_first_that_no_other_estimate_beats():
    def named(name):
        return Candidate({"policy.remat": name})

    guesses = {
        "large": Estimate(1, 101),
        "slow": Estimate(5, 40),
        "fast": Estimate(2, 90),
        "beaten twice": Estimate(4, 95),
        "beaten": Estimate(3, 92),
        "larger": Estimate(0.5, 200),
    }
    estimates = {named(name): guess for name, guess in guesses.items()}
    order = ranked(estimates | {Candidate({}): Estimate(9, 300)}, 100)
    names = ("fast", "slow", "beaten", "beaten twice", "large", "larger")
    assert order == [Candidate({}), *map(named, names)]  # as given first


def test_a_few_of_a_pareto_set_are_spread_over_all_of_it():
    names = "abcdefghi"
    front = {
        Candidate({"policy.remat": name}): Estimate(1 + i, 90 - i)
        for i, name in enumerate(names)
    }
    order = "".join(c.settings["policy.remat"] for c in ranked(front, 100))
    assert sorted(order) == sorted(names)
    assert order.startswith("aie")  # the fastest, the smallest, and between them
    gaps = [sorted(map(names.index, order[:n])) for n in (3, 5)]
    assert gaps == [[0, 4, 8], [0, 2, 4, 6, 8]]
