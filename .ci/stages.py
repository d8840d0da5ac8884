"""What the stages of noxfile.py share: environments, pages, parts and turns."""

import os
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parents[1]
MADE = ROOT / ".nox"

# With PYTHONDONTWRITEBYTECODE each process would compile all that it imports: 3 s more.
EXPORTED = ("VIRTUAL_ENV", "PYTHON", "JAX_", "JSHARD_", "PYTEST_", "XLA_")
for variable in [name for name in os.environ if name.startswith(EXPORTED)]:
    del os.environ[variable]
os.environ |= {
    "CI": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_QUIET": "1",  # with -q: errors only
    "PIP_NO_COMPILE": "0",  # pip reads it as "do not": Python compiles what it imports
}


def environment(
    session: nox.Session,
    folder: Path,
    *needs: str,
    python: str = sys.executable,
    show: str = "",
) -> Path:
    """Installs into a virtual environment, which is made if it is not there.

    Args:
      session: the stage.
      folder: the environment's.
      needs: what to install, and options of pip.
      python: what it is made with.
      show: packages of which to print the versions.

    Returns:
      Its Python.
    """
    pip = folder / "bin" / "pip"
    if not pip.exists():
        session.run(python, "-m", "venv", folder)
    session.run(pip, "install", "--quiet", *needs)
    if show:
        lines = str(session.run(pip, "freeze", silent=True)).splitlines()
        print(*(x for x in lines if x.split("==")[0] in show.split()), flush=True)
    return folder / "bin" / "python"


def newer_python() -> str | None:
    """A Python after 3.11 that runs: what is on PATH may be a broken shim."""
    if sys.version_info >= (3, 12):
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    for minor in (12, 13, 14):
        versions = pyenv.glob(f"versions/3.{minor}.*/bin/python")
        for python in filter(shutil.which, (f"python3.{minor}", *map(str, versions))):
            done = subprocess.run([python, "--version"], capture_output=True)
            if done.returncode == 0:
                return python
    return None


def pytest(
    session: nox.Session, python: Path, words: str, env: dict[str, str] | None = None
) -> None:
    """Runs tests, in this folder; of a few tests some parts have none."""
    codes = [0, 5] if "--part=" in words else [0]
    command = (python, "-m", "pytest", *shlex.split(words))
    session.run(*command, env=env, success_codes=codes)


def shown(session: nox.Session, *command: str | Path, env: dict[str, str]) -> str:
    """What a command prints, which is printed here when it is done."""
    text = str(session.run(*command, silent=True, env=env))
    print(text, flush=True)
    return text


def blocks(name: str, page: Path = ROOT / "README.md") -> Path:
    """A file of the blocks below <!-- ci:NAME -->, exactly as a page has them."""
    programs = runpy.run_path(str(ROOT / "docs" / "blocks.py"))
    text = programs["program"](page.read_text(), f"ci:{name}")
    if not text:
        raise ValueError(f"{page} has no block {name}")
    print(text, flush=True)
    MADE.mkdir(exist_ok=True)
    file = MADE / f"{page.stem}.{name}"
    file.write_text(text)
    return file


def commit() -> int:
    """The commit that is checked out."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    return int(subprocess.check_output(command, text=True), 16)


def part(count: int) -> str:
    """The part of a long stage, which follows from the commit.

    So nobody counts, and a run can be repeated. Each night runs all parts.
    """
    return f"--part={commit() % count + 1}/{count}"


def is_turn(turn: int, turns: int) -> bool:
    """Whether .ci/run takes what it runs for one of several commits, from 0.

    Who names a stage gets all of it.
    """
    return "CI_RUN" not in os.environ or commit() % turns == turn


def in_turn(session: nox.Session, turn: int, turns: int) -> None:
    """Skips a stage for other commits than one of several."""
    if not is_turn(turn, turns):
        session.skip(f"it runs for one of {turns} commits")
