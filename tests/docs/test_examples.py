"""The examples, run as a user runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jshard.plan import has_plugin

REPOSITORY = Path(__file__).parents[2]
PART = re.compile(
    r"^<!-- not run: a part of (\S+), [^>]*-->\n```python\n(.*?)^```", re.M | re.S
)


def losses(name: str, folder: Path, *words: str) -> list[float]:
    """Runs an example on eight devices; returns the losses that it prints."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    environment |= {
        "PYTHONPATH": str(REPOSITORY),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # it compiles faster
    }
    run = subprocess.run(
        [sys.executable, "-W", "error", str(REPOSITORY / "examples" / name), *words],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return [
        float(loss) for loss in re.findall(r"^step .*loss ([\d.]+)", run.stdout, re.M)
    ]


@pytest.mark.slow
def test_bare_functions(tmp_path):
    first, *_, last = losses("bare_functions.py", tmp_path, "--steps=60")
    assert last < first - 1


@pytest.mark.slow
def test_an_equinox_model(tmp_path):
    pytest.importorskip("equinox")
    first, *_, last = losses("equinox_model.py", tmp_path)
    assert last < 0.1 < first


@pytest.mark.slow
def test_a_linen_transformer_that_goes_on(tmp_path):
    words = ("linen_transformer.py", tmp_path, "--folder=run")
    first, *_, middle = losses(*words, "--steps=50")
    assert middle < first - 1.5
    assert losses(*words, "--steps=51")[0] < middle + 0.5
    assert (tmp_path / "run" / "export" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_teacher_that_follows_its_student(tmp_path):
    first, *_, last = losses("teacher.py", tmp_path)
    assert last < first / 2


@pytest.mark.slow
def test_an_own_loop_that_goes_on_on_another_mesh(tmp_path):
    words = ("own_loop.py", tmp_path, "--folder=run")
    first, middle = losses(*words, "--steps=40")
    assert middle < first - 0.2
    assert losses(*words, "--steps=60", "--replica=2")[0] < first - 0.2


@pytest.mark.slow
@pytest.mark.h100
def test_a_plan_of_70b(tmp_path):
    if not has_plugin():
        pytest.skip("no CUDA plugin: pip install 'jshard[plan]'")
    words = ("plan_70b.py", "--gpus=64", "--batch_size=64", "--layers=2")
    run = subprocess.run(
        [sys.executable, str(REPOSITORY / "examples" / words[0]), *words[1:]],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        text=True,
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert re.search(r"^  64 .* GiB +yes .*%", run.stdout, re.M)


def test_the_readme_names_every_example():
    folder = REPOSITORY / "examples"
    named = set(re.findall(r"\]\(([\w.]+)\)", (folder / "README.md").read_text()))
    there = {path.name for path in folder.iterdir() if path.is_file()}
    assert named == there - {"README.md"}


def test_what_tutorials_show_of_examples_is_in_them():
    parts = [
        part
        for page in REPOSITORY.glob("docs/tutorials/*.md")
        for part in PART.findall(page.read_text())
    ]
    assert parts
    for name, code in parts:
        example = (REPOSITORY / name).read_text()
        for piece in code.split("\n\n\n"):
            assert any(
                piece.strip("\n") in text
                for text in (example, re.sub(r"^    ", "", example, flags=re.M))
            ), f"not in {name}:\n{piece}"
