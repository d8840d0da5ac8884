"""`python -m jshard.plan`, as a user sees it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jshard.plan import has_plugin, topology
from jshard.system.formatting import format_seconds

ROOT = Path(__file__).parents[2]
TINY = [
    "--config=gpt.py",
    "--config.batch_size=8",
    f"--config.data.path={__file__}",  # the default takes longer to encode
    "--config.model.num_layers=2",
    "--config.model.width=32",
    "--config.model.sequence_length=32",
]
ATTACHED = [*TINY, "--topology=attached"]
LLAMA = [
    "--config=llama.py:3-8b",
    "--topology=h100:8",
    "--config.batch_size=8",
    "--config.model.num_layers=6",
    "--config.model.width=512",
    "--config.model.hidden=1024",
    "--config.model.num_heads=4",
    "--config.model.num_kv_heads=4",
    "--config.model.vocab_size=1024",
    "--config.model.sequence_length=1024",
]
FULL = ["--config.policy.remat=full", "--config.policy.accumulate=1"]


def test_the_devices_at_hand_have_memory_and_traffic_and_no_timeline(plan, tmp_path):
    code, out, err = plan(
        *ATTACHED,
        *FULL,  # otherwise several are traced
        *(f"--{kind}={tmp_path / kind}" for kind in ("json", "html", "hlo")),
    )
    assert (code, err) == (0, "")
    assert out.startswith("gpt on 8 x cpu\nreplica 1 x fsdp 8; batch 8: 256 tokens")
    assert re.search(r"^MEMORY per device", out, re.M)
    assert re.search(r"^all-gather +f32 +shared memory, 8 devices +\d+", out, re.M)
    assert "TIMELINE        none" in out
    assert re.search(r"^needs .* per device; no GPU to compare with$", out, re.M)

    found = json.loads((tmp_path / "json").read_text())
    assert set(found) == {
        "schema", "versions", "recipe", "config", "topology", "gpu", "mesh", "batch",
        "compile_seconds", "name", "devices", "notes", "fits", "memory", "traffic",
        "pipeline", "timeline", "options", "model",
    }  # fmt: skip
    assert found["schema"] == 2
    assert found["config"]["model.width"] == 32
    assert found["mesh"] == {"replica": 1, "fsdp": 8}
    assert found["batch"] == {"items": 256, "unit": "tokens"}
    assert (found["gpu"], found["timeline"], found["fits"]) == (None, None, None)
    rows = found["traffic"]["rows"]
    kinds = {"all-gather", "reduce-scatter", "all-reduce", "all-to-all"}
    assert {row["kind"] for row in rows} == kinds
    assert found["traffic"]["bytes"] == sum(row["bytes"] for row in rows)

    text = (tmp_path / "hlo").read_text()
    assert text.startswith("HloModule jit_train_step")
    assert is_self_contained((tmp_path / "html").read_text())


def is_self_contained(page: str) -> bool:
    return page.startswith("<!doctype html>") and not re.search(
        r"(src|href)=|@import|url\(|https?://", page
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--config=FILE is missing, or --from-hlo=FILE; see --help"),
        (["--config=gpt.py"], "--topology=GPU:NUMBER is missing; see --help"),
        (["--config=no.py", "--topology=attached"], "no recipe 'no.py'"),
        (["--topolgy=h100:8"], "did you mean --topology?"),
        (
            ["--config=gpt.py", "--topology=v100:8"],
            "unknown GPU 'v100'; possible: a100",
        ),
        (["--config=gpt.py", "--topology=h100:12"], "must be 1 to 8, or a multiple of"),
        (
            [*ATTACHED, "--config.batch_size=12"],
            "of the 8 devices of the mesh; use 8 or 16",
        ),
        ([*ATTACHED, "--config.model.widht=1"], "did you mean model.width"),
        ([*ATTACHED, "--trace=x.json"], "there is no timeline"),
        pytest.param(
            [*ATTACHED, *FULL, "--imbalance=2"],
            "--imbalance=2: the step has no experts",
            marks=pytest.mark.slow,  # it traces the step
        ),
        ([*ATTACHED, "--imbalance=0.5"], "--imbalance=0.5: must be a finite number"),
        ([*ATTACHED, "--imbalance=2", "--search"], "--imbalance: shows one plan"),
        ([*ATTACHED, "--json=nowhere/x.json"], "there is no folder nowhere"),
        ([*ATTACHED, "--html=."], "this is a folder"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(plan, words, says, monkeypatch):
    monkeypatch.setattr(topology, "has_plugin", lambda: True)
    code, out, err = plan(*words)
    assert (code, out) == (2, "")
    assert says in err
    assert err.startswith("jshard: error: ")
    assert err.count("\n") == 1


def test_micro_batches_must_divide_the_batch_too(plan):
    words = [*ATTACHED, "--config.policy.accumulate=3"]
    code, _, err = plan(*words)
    assert code == 2
    assert "a multiple of the 8 devices of the mesh times 3 micro-batches" in err


def test_without_the_plugin_the_error_says_what_to_install(plan, monkeypatch):
    monkeypatch.setattr(topology, "has_plugin", lambda: False)
    code, _, err = plan(*TINY, "--topology=h100:8")
    assert code == 2
    assert "pip install 'jshard[plan]'" in err


def test_help_names_the_constants_and_with_a_recipe_its_keys(plan):
    code, out, _ = plan("--help")
    assert code == 0
    assert "matrix products at 64% of the dense bf16 peak" in out
    assert "fitted to 22 published runs" in out
    code, out, _ = plan("--config=gpt.py", "--help")
    assert code == 0
    assert "--config.model.width=128\n" in out


# For absent H100s.


def on_h100s(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command with nothing set in the environment."""
    if not has_plugin():
        pytest.skip("no CUDA plugin: pip install 'jshard[plan]'")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "XLA_", "TF_"))
    }
    return subprocess.run(
        [sys.executable, "-m", "jshard.plan", *words],
        cwd=folder,
        env=environment | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
    )


def of_jshard(stderr: str) -> str:
    """Drops XLA's remarks: on absent GPUs, and that memory is above its limit."""
    remarks = r"^(?:[IW]\d{4} |WARNING: All log messages before absl::Init).*\n"
    return re.sub(remarks, "", stderr, flags=re.MULTILINE)


@pytest.mark.h100
def test_a_llama_for_h100s_has_a_timeline_in_every_form(tmp_path):
    kinds = ("json", "html", "trace", "hlo")
    run = on_h100s(tmp_path, *LLAMA, *(f"--{kind}={kind}" for kind in kinds))
    assert (run.returncode, of_jshard(run.stderr)) == (0, "")
    assert re.search(r"^fits: \d+\.\d (MiB )?of 75\.2 GiB$", run.stdout, re.M)
    for heading in ("MEMORY", "TRAFFIC", "TIMELINE", "KERNELS", "OPTIONS", "MODEL"):
        assert re.search(f"^{heading}", run.stdout, re.M)
    found = json.loads((tmp_path / "json").read_text())
    timeline = found["timeline"]
    parts = (timeline[part] for part in ("exposed", "floor", "stragglers"))
    assert sum(parts) == pytest.approx(timeline["seconds"])
    tokens = 8 * 1024
    assert timeline["items_per_second"] == pytest.approx(tokens / timeline["seconds"])
    assert 0 < timeline["mfu"] < 0.72
    low, high = timeline["seconds_range"]
    assert low < timeline["seconds"] < high
    assert found["model"]["measured_over_predicted"] == [0.92, 1.11]
    between = f"{format_seconds(low)} to {format_seconds(high)}"
    assert re.search(rf"^ +{between}, given published runs$", run.stdout, re.M)
    assert timeline["kind"] == "bf16 on H100"
    sure = f"step ({between}, given published runs)"
    assert sure in (tmp_path / "html").read_text()
    for name in ("forward, layers", "backward, layers", "update"):
        assert timeline["phases"][name] > 0
    lasts = [gap["seconds"] for gap in timeline["gaps"]]
    assert lasts == sorted(lasts, reverse=True)
    gathers = [x for x in found["traffic"]["rows"] if x["kind"] == "all-gather"]
    assert {row["link"] for row in gathers} == {"NVLink"}
    assert "is_scheduled=true" in (tmp_path / "hlo").read_text()
    page = (tmp_path / "html").read_text()
    assert is_self_contained(page)
    assert page.count('<figure class="timeline"') == 3
    events = json.loads((tmp_path / "trace").read_text())["traceEvents"]
    last = max(x["ts"] + x["dur"] for x in events if x["ph"] == "X")
    assert last == pytest.approx(1e6 * timeline["seconds"])


@pytest.mark.h100
def test_copies_on_hosts_send_only_sums_of_shards_over_the_network(tmp_path):
    words = [*LLAMA, "--topology=h100:16", "--config.batch_size=16"]
    words += ["--config.mesh.replica=hosts", "--json=json", "--html=html"]
    run = on_h100s(tmp_path, *words)
    assert (run.returncode, of_jshard(run.stderr)) == (0, "")
    found = json.loads((tmp_path / "json").read_text())
    assert found["mesh"] == {"replica": 2, "fsdp": 8}
    traffic = found["traffic"]
    links = {(row["kind"], row["link"], row["group"]) for row in traffic["rows"]}
    assert links >= {("all-gather", "NVLink", 8), ("reduce-scatter", "NVLink", 8)}
    assert {link for link in links if link[1] == "network"} == {
        ("all-reduce", "network", 2),  # of the shards of gradients
        ("all-reduce", "network", 16),  # of what is whole on each device
    }
    shards = sum(row["bytes"] for row in traffic["rows"] if row["group"] == 2)
    small = traffic["network_bytes"] - shards
    assert 0 <= small < 0.02 * shards
    assert traffic["network_bytes"] < 0.2 * traffic["bytes"]
    says = "over the network: .* per device, through its own port"
    assert re.search(says, run.stdout)
    assert re.search(says, (tmp_path / "html").read_text())


@pytest.mark.h100
def test_what_does_not_fit_exits_3(tmp_path):
    words = [*LLAMA, "--config.model.vocab_size=1048576", "--config.model.width=8192"]
    run = on_h100s(tmp_path, *words, *FULL, "--config.model.hidden=65536")
    assert (run.returncode, of_jshard(run.stderr)) == (3, "")
    assert re.search(r"^does not fit: \d+\.\d of 75\.2 GiB$", run.stdout, re.M)


@pytest.mark.h100
def test_what_fits_is_chosen_for_the_cards_memory(tmp_path):
    words = [*LLAMA, "--topology=h100:1", "--json=json"]
    for batch, accumulate in ((8, 1), (4096, 8)):
        run = on_h100s(tmp_path, *words, f"--config.batch_size={batch}")
        assert (run.returncode, of_jshard(run.stderr)) == (0, "")
        chosen = re.search(r"^chosen: remat none, (\d+) micro-batch", run.stdout, re.M)
        found = json.loads((tmp_path / "json").read_text())
        assert chosen
        assert int(chosen[1]) == found["config"]["policy.accumulate"] == accumulate
        assert found["config"]["policy.remat"] == "none"
    assert re.search(r"; with 4 it would need about \d+\.\d GiB$", run.stdout, re.M)
