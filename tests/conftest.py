"""The machine that the tests see: eight CPU devices, or the GPUs when asked.

``JSHARD_TEST_PLATFORM=gpu pytest -n 0`` runs on this machine's GPUs.
"""

import gc
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import hypothesis
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tiny_runs import RECIPE

if os.environ.get("JSHARD_TEST_PLATFORM") != "gpu":
    # In the environment too, for the processes that tests start. It also keeps an
    # installed CUDA plugin from looking for GPUs.
    jax.config.update("jax_platforms", os.environ.setdefault("JAX_PLATFORMS", "cpu"))
jax.config.update("jax_num_cpu_devices", 8)
# No test reads the lines of Python that a program names; to find them takes time.
jax.config.update("jax_traceback_in_locations_limit", 0)

# Mistyped paths may be names on the Hugging Face Hub, which no test asks but those that
# bring a hub of their own.
os.environ["HF_HUB_OFFLINE"] = "1"

# Programs of tests run for milliseconds, but XLA's newer code generator takes long to
# make them. Since JAX 0.11 there is no other, and README's commands, which
# .ci/run runs too, compile as users do.
FLAGS = "--xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ < (0, 11):
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{FLAGS} {os.environ.get('XLA_FLAGS', '')}"

# A shell ignores it in what runs in the background, and so would runs that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["rings"]

# Helpers of the tests, whose assertions explain themselves like a test's own.
pytest.register_assert_rewrite(
    "checkpoints",
    "decoder",
    "exports",
    "failures",
    "hlo",
    "jobs",
    "parity",
    "resumable",
    "runs",
)

# Compiling dwarfs any deadline. CI draws the same examples every time, so that a
# failure there is a change in the code; runs by hand keep looking for new ones.
hypothesis.settings.register_profile(
    "jshard", deadline=None, derandomize="CI" in os.environ
)
hypothesis.settings.load_profile("jshard")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks slow cases, before pytest selects by marks."""
    for function, cases in _cases(items).items():
        chosen = any("[" in word for word in config.args)  # not all cases are there
        _mark_slow(function, cases, all_there=not chosen)


def pytest_collection_finish():
    """Spares Python's collector what is imported, and most of its rounds.

    Traced programs are many objects without cycles. It takes a tenth of the time else.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


def _cases(items):
    """The cases of each parametrized test with a ``quick`` mark."""
    cases = {}
    for item in items:
        if item.get_closest_marker("quick"):
            cases.setdefault(item.function, []).append(item)
    return cases


def _mark_slow(function, cases, all_there):
    """Marks all cases slow but those that ``quick`` names by the start of their ids.

    Raises:
      UsageError: a name is that of no case, though all are there.
    """
    quick = cases[0].get_closest_marker("quick").args
    ids = {case.callspec.id for case in cases}
    beginnings = tuple(set(quick) - ids)
    names = {name for name in ids if name in quick or name.startswith(beginnings)}
    for name in quick:
        if all_there and not any(found.startswith(name) for found in names):
            raise pytest.UsageError(f"{function.__name__}: no case is called {name}")
    for case in cases:
        if case.callspec.id not in names:
            case.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Machine code need not be good that runs for milliseconds; for GPUs it counts."""
    for_gpus = item.get_closest_marker("h100") is not None
    jax.config.update("jax_disable_most_optimizations", not for_gpus)


@pytest.fixture
def x64():
    """Run the test in 64-bit precision, as parity tests do, Orbax's threads too."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    """Keeps what is compiled, for tests that make the same programs again and again."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in settings}

    def choose(values):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # it looks at its settings once

    choose(settings)
    yield
    choose(before)


@pytest.fixture(scope="session")
def command(tmp_path_factory):
    """Makes the arguments of `subprocess.run` for the command line in a folder."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "XLA_", "FORCE_COLOR"))
    }
    environment |= {
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "XLA_FLAGS": os.environ["XLA_FLAGS"],
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("programs")),
    }

    def make(folder, *words, env=None):
        return {
            "args": [sys.executable, "-m", "jshard.train", *words],
            "cwd": folder,
            "env": environment | (env or {}),
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
        }

    return make


# Checkpoints of a small state, imported only after JAX is set up above.


@pytest.fixture(scope="session")
def state():
    """A state that has everything a checkpoint holds, after a step on eight devices."""
    from checkpoints import make_fsdp, trained

    return trained(make_fsdp())


@pytest.fixture(scope="session")
def abstract():
    """The same, abstract."""
    from checkpoints import OPTIMIZER, Model, make_fsdp

    return make_fsdp().abstract_state(Model, OPTIMIZER)


@pytest.fixture(scope="session")
def saved(state, tmp_path_factory):
    """A folder with the whole checkpoints 1, 2 and 3; do not change it."""
    from checkpoints import save_steps

    folder = tmp_path_factory.mktemp("saved")
    save_steps(folder, state, 1, 2, 3)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of it."""
    return shutil.copytree(saved, tmp_path / "checkpoints")


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """An uninterrupted run, of two processes with two devices each."""
    from failures import WORDS
    from jobs import Job, write_recipe

    folder = tmp_path_factory.mktemp("whole")
    write_recipe(folder)
    with Job(folder, 2, 2, *WORDS) as job:
        assert job.wait() == [0, 0], job.err()
    return folder / "run"


@pytest.fixture
def train_here(monkeypatch, capsys):
    """As `train`, in this process: what is refused need not import JAX again."""
    import jshard.train
    from jshard.training import train_command

    monkeypatch.setattr(train_command, "make_cpu_devices", lambda count: None)
    monkeypatch.setattr(train_command, "cache_compilations", lambda *_, **__: None)
    monkeypatch.setattr("warnings.formatwarning", None)  # the command sets its own

    def run(folder, *words, recipe=RECIPE):
        (folder / "tiny.py").write_text(recipe)
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["jshard.train", *words])
        with pytest.raises(SystemExit) as end:
            jshard.train.main()
        code = int(end.value.code or 0)
        return subprocess.CompletedProcess(sys.argv, code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def train(command):
    """Runs the command line to its end, with the recipe in `tiny.py`."""

    def run(folder, *words, recipe=RECIPE, **options):
        (folder / "tiny.py").write_text(recipe)
        return subprocess.run(timeout=120, **command(folder, *words, **options))

    return run
