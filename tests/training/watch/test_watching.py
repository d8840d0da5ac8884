"""`watch.replay` and `watch.replicas` in a run: what is said, kept, and done then."""

import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jshard
from flipped import Block, Flip, Flipping, rows
from jshard.system.errors import RunFailed, UserError
from jshard.training.watch import watching
from processes import Processes
from resumable import read_metrics

pytestmark = [
    pytest.mark.usefixtures("compiled_once"),
    pytest.mark.filterwarnings("ignore:100% of the parameters are in no Stack"),
]

# Before the first step there are two computations here and one elsewhere; in step 2
# there is one elsewhere and one here.
ELSEWHERE_IN_STEP_2, HERE_IN_STEP_2 = 3, 4


def loss_fn(model: Block, batch: Any) -> jshard.Mean:
    error = model(batch["x"], batch["fault"][0]).sum(1) - batch["x"].sum(1)
    return jshard.Mean(jnp.sum(error**2), error.size)


def make(folder: Path, *, number: int = 2, **given: Any) -> jshard.Trainer:
    """A trainer of four steps on examples that differ, on some of the devices."""
    parts: dict[str, Any] = {
        "make_model": lambda config, rngs: Block(rngs),
        "make_optimizer": lambda config: optax.sgd(1e-2),
        "loss_fn": loss_fn,
        "train_data": rows(64),
        "mesh": jshard.make_mesh(devices=jax.devices()[:number]),
    }
    config = {"steps": 4, "batch_size": 16, "log_every": 1, "checkpoint.every": 100}
    config |= {"policy.min_shard_elements": 0} | given.pop("config", {})
    return jshard.Trainer(config=config, workdir=folder / "run", **(parts | given))


class Broken(Flipping):
    """A replay on devices of which the second computes wrong, in step 2."""

    fault = Flip(
        device=1, site=1, layer=0, element=9, bit=30, computations=(HERE_IN_STEP_2,)
    )
    newest: "Broken"

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        Broken.newest = self


def losses(folder: Path) -> list[tuple[float, float]]:
    lines = read_metrics(folder / "run")
    return [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


@pytest.mark.parametrize(
    ("place", "note"),
    [
        ("device", "a second state, "),
        pytest.param("host", "its state in host memory, ", marks=pytest.mark.slow),
    ],
)
def test_a_difference_ends_the_run_or_is_said_and_the_bits_are_right_in_both(
    place, note, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(watching, "Replay", Broken)
    ended, gone_on = tmp_path / "ended", tmp_path / "gone_on"
    config = {"watch.replay": 2, "watch.replay_state": place}
    trainer = make(ended, config=config)
    with pytest.raises(RunFailed) as caught:
        trainer.fit()
    assert re.fullmatch(
        r"step 2: device 1 \(process 0, host \S+\) computed other bits than other "
        r"devices, once in 4 times, first in down\.kernel; the state before "
        r"it is saved as step 1; the hashes are in \S+/run/difference-step-2\.json",
        str(caught.value),
    )
    assert (
        "replay          of the first step and every 2nd, on the devices 1 further on; "
        + note
    ) in capsys.readouterr().out
    found = json.loads((ended / "run/difference-step-2.json").read_text())
    assert (found["step"], found["found"], found["places"]) == (2, "device", [1])
    named = [one["name"] for one in found["hashes"] if one["kind"] == "gradient"]
    assert named[0] == "down.kernel"
    distances = [one["devices_further_on"] for one in found["computations"]]
    assert distances == [0, 1, 0, 1]
    with np.load(ended / "run/difference-step-2.npz") as batch:
        assert batch["x"].shape == (16, 8)
    # Each gradient has a hash, and each array of the state, and each metric.
    hashed = Counter(event.kind for event in Broken.newest.events)
    params, arrays = trainer.state.params, jax.tree.leaves(trainer.state)
    assert hashed["gradient"] == len(jax.tree.leaves(params))
    assert hashed["state"] == len(arrays) + len(["loss", "grad_norm"])
    # It goes on unwatched, without a word but that this key is another one.
    make(ended).fit()
    start, _, rest = capsys.readouterr().out.partition("\n")
    assert "run after step 1; config differs from the run's: " in start
    assert "watch.replay 2 -> 0" in start
    assert "replay" not in rest
    # What goes on instead computes the step again, so that both are the same run.
    make(gone_on, config=config | {"watch.on_difference": "go_on"}).fit()
    said = " ".join(capsys.readouterr().out.split())
    assert "step 2: device 1 (process 0, host " in said
    assert "; the run goes on (watch.on_difference)" in said
    assert losses(gone_on) == losses(ended)
    counted = [line.get("differences") for line in read_metrics(gone_on / "run")]
    assert counted == [None, 1.0, 1.0, 1.0]


def flip_after(step: int, place: int) -> Any:
    """A hook that flips a bit of what one device holds of a replicated array."""

    def flip(trainer: Any, now: int, metrics: Any) -> None:
        if now == step:
            kernel = trainer.state.params["up"]["kernel"]
            x = kernel.get_value()
            shards = [np.array(shard.data) for shard in x.addressable_shards]
            shards[place].view(np.uint32)[3, 5] ^= 1 << 20
            pairs = zip(shards, x.addressable_shards, strict=True)
            placed = [jax.device_put(shard, old.device) for shard, old in pairs]
            like = x.shape, x.sharding, placed
            kernel.set_value(jax.make_array_from_single_device_arrays(*like))

    return flip


@pytest.mark.parametrize(
    "on_difference", ["end", pytest.param("go_on", marks=pytest.mark.slow)]
)
def test_a_copy_that_differs_is_named_with_when_copies_agreed(
    on_difference, tmp_path, capsys
):
    config = {"watch.replicas": 2, "watch.on_difference": on_difference}
    given = {"policy.min_shard_elements": 10**9, "checkpoint.every": 2}
    trainer = make(tmp_path, config=config | given, on_step=flip_after(3, place=1))
    said = ""
    if on_difference == "end":
        with pytest.raises(RunFailed) as caught:
            trainer.fit()
        said = str(caught.value)
    else:
        trainer.fit()
    out = " ".join(capsys.readouterr().out.split())
    assert "replicas copies of 4 of 4 arrays compared every 2nd step, 80 B of" in out
    said = " ".join((said or out).split())
    assert "after step 4 device 0 (process 0, host " in said
    assert (
        " hold other copies of params.up.kernel, and which is right cannot be " in said
    )
    assert "told; copies agreed after step 2; the hashes are in " in said
    assert (tmp_path / "run/difference-after-step-4.json").exists()
    saved = {path.name for path in (tmp_path / "run/checkpoints").iterdir()}
    assert any(name.startswith("4") for name in saved) == (on_difference == "go_on")


def test_a_full_disk_hides_no_device(tmp_path):
    def full() -> None:
        raise OSError(28, "No space left on device")

    run = SimpleNamespace(shown="runs/mine", peers=SimpleNamespace(index=0))
    settings = SimpleNamespace(on_difference="end")
    watch: Any = SimpleNamespace(_run=run, _settings=settings)
    said = r"^device 1 is wrong; the hashes could not be written: No space left on dev"
    with pytest.raises(RunFailed, match=said):
        watching.Watching._end_or_say(
            watch, "device 1 is wrong", tmp_path / "difference.json", "", full
        )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"watch.on_difference": "stop"},
            "watch.on_difference=stop: must be end or go_on",
        ),
        ({"watch.replay": -1}, "watch.replay=-1: "),
        ({"watch.replay": 5}, "the mesh has one: use at least two, or watch.replay=0"),
        ({"watch.replicas": 5}, "on this mesh there is none: use watch.replicas=0"),
        ({"watch.replay_state": "host"}, "no step is computed again without watch.rep"),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_line_before_the_folder_is_made(given, said, tmp_path):
    with pytest.raises(UserError) as caught:
        make(tmp_path, number=1, config=given).fit()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run/config.json").exists()


def fails_in_two_processes(folder: Path, place: str) -> str:
    """Trains on four devices of which the last computes wrong always, from step 2."""

    class Worn(Flipping):
        fault = Flip(3, 1, 0, 9, 30, tuple(range(ELSEWHERE_IN_STEP_2, 99)))

    watching.Replay = Worn
    config = {"watch.replay": 2, "watch.replay_state": place}
    try:
        make(folder, number=4, config=config).fit()
    except RunFailed as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["device", "host"])
def test_each_of_two_processes_names_the_others_device(place, tmp_path):
    with Processes(2, 2, tmp_path) as processes:
        first, second = processes.call(fails_in_two_processes, tmp_path, place)
    assert first == second
    assert re.match(r"step 2: device \d+ \(process 1, host \S+\) computed ", first)
    assert "again and again, first in down.kernel; " in first
    found = json.loads((tmp_path / "run/difference-step-2.json").read_text())
    assert found["places"] == [3]
