"""Programs on the pages run, or say why not."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
BLOCKS = runpy.run_path(str(REPOSITORY / "docs" / "blocks.py"))
COMMANDS = {"ci:run": ["bash", "-ex"], "ci:python": [sys.executable]}
# What pages import that jshard[test] does not bring, by its extra.
NOT_IN_TEST = {
    "moto": "buckets-test",
    "torch": "huggingface",
    "lm_eval": "evaluate",
    "datasets": "datasets",
    "optuna": "trackers-test",
}
RUNNING = [
    (page, comment)
    for page in BLOCKS["pages"]()
    for comment in COMMANDS
    if BLOCKS["program"](page.read_text(), comment)
]


def test_every_program_is_run_or_says_why_not():
    texts = {str(page): page.read_text() for page in BLOCKS["pages"]()}
    unmarked = BLOCKS["unmarked"]
    assert {page: x for page, text in texts.items() if (x := unmarked(text))} == {}


def test_a_program_without_a_comment_is_found():
    text = (
        "```bash\na\n```\n<!-- ci:run -->\n```bash\nb\n```\n"
        "<!-- not run: why -->\n```python\nc\n```\n<!-- ci:run -->\n```python\nd\n```\n"
        "```\noutput\n```\n- <!-- ci:python -->\n  ```python\n  e\n  ```\n"
    )
    found = BLOCKS["unmarked"](text)
    assert found == ["line 1: bash, without a comment", "line 13: python, ci:run"]
    assert BLOCKS["program"](text, "ci:python") == "e\n"
    whole = "<!-- not run on this page: why -->\n```bash\na\n```\n"
    assert not BLOCKS["unmarked"](whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "comment"),
    RUNNING,
    ids=[f"{page.stem}-{comment.removeprefix('ci:')}" for page, comment in RUNNING],
)
def test_programs_run(page, comment, tmp_path):
    # As in a checkout, but what they write is not in it.
    for name in ("docs", "examples", "models", "train"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    file = tmp_path / "program"
    program = BLOCKS["program"](page.read_text(), comment)
    for module, extra in NOT_IN_TEST.items():
        if re.search(
            rf"^(from|import) .*\b{module}\b|jshard\.{extra} ", program, re.MULTILINE
        ):
            pytest.importorskip(module, reason=f"needs jshard[{extra}]")
    file.write_text(program)
    folders = [str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = os.environ | {
        "PATH": os.pathsep.join(folders),
        "PYTHONPATH": str(REPOSITORY),
        "JAX_PLATFORMS": "cpu",
    }
    if comment == "ci:python":
        environment["JAX_NUM_CPU_DEVICES"] = "8"
    done = subprocess.run(
        [*COMMANDS[comment], file],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
