"""What counts in a run goes on: examples, updates of the optimizer, averages."""

from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp

import jshard
from jshard.data.position import read_position
from jshard.errors import UserError
from jshard.hub.parameters import find_parameters
from resumable import read_metrics
from stopped_runs import NO_NOISE, STEPS, go_on, train

pytestmark = pytest.mark.usefixtures("compiled_once")


def test_a_run_goes_on_with_another_batch_size_at_the_next_example(run, whole):
    keys: dict[str, Any] = {"eval_every": 0, "checkpoint__accept": ("batch_size",)}
    go_on(run, steps=8, batch_size=16, **keys)
    lines, want = (
        {line["step"]: line for line in read_metrics(x) if "loss" in line}
        for x in (run, whole)
    )
    means = [(want[i]["token_sum"] + want[i + 1]["token_sum"]) / 2 for i in (7, 9)]
    assert [lines[step]["token_sum"] for step in (7, 8)] == means
    assert [lines[step]["tokens_seen"] / 8 for step in (6, 7, 8)] == [48, 64, 80]
    # What a third batch size goes on from.
    assert read_position(run / "checkpoints/8", 8, 4) == 80


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_a_run_goes_on_with_anothers_optimizer_schedule_and_averages(
    whole, tmp_path, capsys
):
    keys = {"checkpoint__restore": whole, "checkpoint__restore_optimizer": True}
    new = train(tmp_path, steps=1, eval_every=0, **keys, **NO_NOISE)
    before, after = (
        ocp.load(run / f"checkpoints/{step}/state")
        for run, step in ((whole, STEPS), (new, 1))
    )
    assert int(after["opt_state"]["1"]["count"]) == STEPS + 1
    assert int(after["step"]) == 1
    said = f"from its optimizer after {STEPS} updates: schedules and averages go on"
    assert said in capsys.readouterr().out
    schedule = optax.cosine_decay_schedule(1e-2, 100)
    rate = read_metrics(new)[0]["learning_rate"]
    assert rate == pytest.approx(float(schedule(STEPS)))
    d = (2 + STEPS) / (11 + STEPS)
    average, old = after["ema"]["head"]["kernel"], before["ema"]["head"]["kernel"]
    want = d * old + (1 - d) * after["params"]["head"]["kernel"]
    np.testing.assert_allclose(average, want, rtol=1e-5)


def test_averages_do_not_go_on_by_an_optimizer_that_does_not_count(tmp_path):
    fsdp = jshard.FSDP(jshard.make_mesh(), jshard.Policy(ema_decay=0.9))
    make = lambda rngs: nnx.Sequential(jshard.Unit(nnx.Linear(8, 8, rngs=rngs)))
    state = fsdp.abstract_state(make, optax.sgd(0.1, 0.9))
    with pytest.raises(UserError, match=r"restore_optimizer: averages .* keeps none"):
        find_parameters(tmp_path, state, optimizer=True)
