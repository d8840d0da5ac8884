"""Plans of pipelines, compiled for absent GPUs."""

import json
import re

import pytest

from jshard.plan import has_plugin, topology
from jshard.sharding.pipeline.schedule import bubble
from jshard.sharding.settings.mesh import make_mesh

pytestmark = [
    pytest.mark.skipif(not has_plugin(), reason="needs the extra plan"),
    pytest.mark.filterwarnings("ignore:mesh. pipe=.*bubble"),
]
STAGES, MICRO, LAYERS = 4, 8, 16
LLAMA = [
    "--config=llama.py:3-8b",
    "--topology=h100:32",
    "--config.batch_size=64",
    f"--config.mesh.pipe={STAGES}",
    f"--config.model.num_layers={LAYERS}",
    "--config.model.width=2048",
    "--config.model.hidden=5632",
    "--config.model.num_heads=16",
    "--config.model.num_kv_heads=4",
    "--config.model.vocab_size=1024",
    "--config.model.sequence_length=4096",
]
GIVEN = ["--config.policy.remat=full", f"--config.policy.accumulate={MICRO}"]


def test_what_is_to_be_chosen_by_memory_is_given_for_stages(plan):
    code, out, err = plan(*LLAMA, GIVEN[0], "--config.policy.accumulate=fit")
    assert (code, out) == (2, "")
    assert err == (
        "jshard: error: mesh: pipe=4: --config.policy.accumulate cannot be 'fit' with "
        "stages; give values, e.g. those that jshard.plan --search=mesh.pipe finds\n"
    )


@pytest.mark.slow
def test_a_pipeline_is_idle_for_its_bubble_and_sends_in_each_tick(plan, tmp_path):
    """The head is small here, so that no stage is much longer than another."""
    file, page = tmp_path / "plan.json", tmp_path / "plan.html"
    code, out, _ = plan(*LLAMA, *GIVEN, f"--json={file}", f"--html={page}")
    assert code == 0
    found = json.loads(file.read_text())
    pipeline, timeline = found["pipeline"], found["timeline"]
    ticks = (MICRO + STAGES - 1) * 4
    assert (pipeline["stages"], pipeline["ticks"]) == (STAGES, ticks)
    assert pipeline["scheduled_bubble"] == pytest.approx(bubble(STAGES, MICRO))
    assert pipeline["activations"] == [4, 3, 2, 1]
    # The parts of a backward are not quite as long as a forward, and the step is more
    # than its ticks.
    assert 0.9 < pipeline["bubble"] / bubble(STAGES, MICRO) < 1.25
    rows = {(row["kind"], row["link"]): row for row in found["traffic"]["rows"]}
    sent = rows["collective-permute", "network"]
    assert (sent["count"], sent["group"]) == (2 * ticks, 2)
    assert sent["bytes"] == 2 * ticks * 4096 * 2048 * 2
    assert 0 < pipeline["exposed_sends"] <= sent["seconds"] * 1.01
    assert pipeline["exposed_sends"] <= timeline["exposed"]
    phases = timeline["phases"]
    assert phases["backward, layers"] > 2 * phases["forward, layers"] > 0
    # All that a device computes, once per micro-batch: it is busy but for its waits.
    waits = timeline["exposed"] + pipeline["idle"][pipeline["shown"]]
    busy = timeline["busy"]["compute"]
    assert busy + waits + timeline["stragglers"] == pytest.approx(
        timeline["seconds"], rel=0.01
    )
    for words in ("bubble", "sends", "activations of its stage for 4 micro-batches"):
        assert words in out
    boxes = re.findall(r'class="schedule-(?:forward|backward)', page.read_text())
    assert len(boxes) >= 2 * STAGES * MICRO


@pytest.mark.slow
def test_a_search_finds_stages(plan, monkeypatch, tmp_path):
    monkeypatch.setenv("JSHARD_CACHE", str(tmp_path))
    words = [word for word in LLAMA if "mesh.pipe" not in word]
    file = tmp_path / "search.json"
    code, _, err = plan(
        *words,
        *GIVEN,
        "--search=mesh.pipe",
        "--search.mesh.replica=1",
        "--limit=3",
        f"--json={file}",
    )
    assert code == 0, err
    found = json.loads(file.read_text())
    compiled = [x for x in found["outcomes"] if not x["error"]]
    stages = [x["candidate"]["settings"].get("mesh.pipe", 1) for x in compiled]
    assert any(number > 1 for number in stages)


def test_devices_of_a_stage_are_neighbours():
    """What the replay of stages takes for granted."""
    mesh = make_mesh(pipe=2, replica=2, devices=topology.devices("h100:16"))
    assert mesh.axis_names[:3] == ("replica", "pipe", "fsdp")
    ids = [[[d.id for d in stage] for stage in copy] for copy in mesh.devices]
    assert ids == [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9, 10, 11], [12, 13, 14, 15]]]
