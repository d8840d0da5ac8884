"""A checkpoint goes on with skip_spikes turned on or off, or another window."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jshard
from checkpoints import Model, make_fsdp, make_state, values
from jshard.storage.checkpoint.checkpointer import Checkpointer
from jshard.storage.hub.parameters import find_parameters
from jshard.system.errors import UserError

OPTIMIZERS = {
    "off": optax.adam(0.1),
    "4": jshard.optim.skip_spikes(optax.adam(0.1), window=4),
    "6": jshard.optim.skip_spikes(optax.adam(0.1), window=6),
}
SAID = {
    ("off", "4"): "was saved without skip_spikes, which this run has",
    ("4", "off"): "was saved with skip_spikes, which this run is without",
    ("4", "6"): "has a window of 4 steps in skip_spikes, this run one of 6",
}

ANEW = {f"opt_state.{x}" for x in ("losses", "grad_norms", "accepted")}


def abstract(kind: str, fsdp: int = 8) -> jshard.TrainState:
    return make_fsdp(1, fsdp).abstract_state(Model, OPTIMIZERS[kind])


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, tuple[Path, jshard.TrainState]]:
    """A checkpoint without, and one with a window of 4, with their states."""
    found = {}
    for kind in ("off", "4"):
        folder, state = tmp_path_factory.mktemp(kind), make_state(abstract(kind), 7)
        with Checkpointer(folder) as checkpointer:
            checkpointer.save(state)
        found[kind] = folder, state
    return found


def by_name(state: jshard.TrainState) -> dict[str, Any]:
    """Values by name, of the optimizer's within skip_spikes by that without it."""
    found = values(state).items()
    return {name.replace("opt_state.inner.", "opt_state."): x for name, x in found}


@pytest.mark.parametrize(("before", "now"), SAID)
def test_what_both_remember_is_read_and_the_rest_begins_anew(saved, before, now):
    (folder, state), wanted = saved[before], abstract(now, fsdp=4)
    said = f"{SAID[before, now]}: only what both remember is read$"
    with pytest.warns(UserWarning, match=said):
        restored = Checkpointer(folder).restore(wanted)
    same = lambda x, like: x.sharding.is_equivalent_to(like.sharding, x.ndim)
    assert all(jax.tree.leaves(jax.tree.map(same, restored, wanted)))
    got, want = by_name(restored), by_name(state)
    both = got.keys() & want.keys() - (ANEW if before == "4" and now == "6" else set())
    assert all(np.array_equal(got[name], want[name]) for name in both)
    anew = {name.removeprefix("opt_state.") for name in got.keys() - both}
    assert (
        anew
        == {
            ("off", "4"): {"losses", "grad_norms", "accepted", "skipped", "in_a_row"},
            ("4", "off"): set(),
            ("4", "6"): {"losses", "grad_norms", "accepted"},
        }[before, now]
    )
    assert not any(np.any(got[f"opt_state.{name}"]) for name in anew)


@pytest.mark.parametrize(
    ("before", "now"),
    [("off", "4"), *(pytest.param(*x, marks=pytest.mark.slow) for x in [*SAID][1:])],
)
def test_an_optimizer_for_a_new_run_is_refused_with_the_keys_to_set(saved, before, now):
    said = f"^checkpoint.restore_optimizer: .* {SAID[before, now]}: set optimizer.skip"
    with pytest.raises(UserError, match=said):
        find_parameters(saved[before][0], abstract(now), optimizer=True)
    find_parameters(saved[before][0], abstract(now))


@pytest.mark.slow
def test_another_optimizer_within_is_still_refused(saved):
    other = jshard.optim.skip_spikes(optax.sgd(0.1, momentum=0.9), window=4)
    wanted = make_fsdp(1, 8).abstract_state(Model, other)
    with pytest.raises(UserError, match="is of another model or optimizer"):
        Checkpointer(saved["off"][0]).restore(wanted)
