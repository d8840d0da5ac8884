"""`import jshard`, and the list of commands."""

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jshard
from jshard.system.cli.commands import COMMANDS
from jshard.system.cli.machine.platform import has_accelerator

REPOSITORY = Path(__file__).parents[2]
RECIPE = """
import jax
from ml_collections import ConfigDict

jax.devices()


def get_config():
    return ConfigDict({"steps": 6, "batch_size": 16})


def make_model(config, rngs): ...
def make_optimizer(config): ...
def loss_fn(model, batch): ...
def make_data(config, split): ...
"""
WATCHED = """
import importlib, logging, os, pkgutil, sys, threading, time
def watch(event, args):
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec"):
        sys.exit(f"{event} {args}")
sys.addaudithook(watch)
os.dup2 = lambda *fds, **_: sys.exit(f"dup2 {fds}")
environment, before, started = dict(os.environ), {*sys.modules}, time.process_time()
import jshard
seconds = time.process_time() - started
loaded = {*sys.modules} - before
ours = [name for name in loaded if name.startswith("jshard")]
assert ours == ["jshard"] or sys.exit(f"imports {ours}")
heavy = loaded & {"jax", "numpy", "flax", "optax", "subprocess", "asyncio"}
assert not heavy or sys.exit(f"imports {heavy}")
assert seconds < 0.25 or sys.exit(f"takes {seconds} seconds of CPU, not 0.03")
assert threading.active_count() == 1 or sys.exit("starts a thread")
assert dict(os.environ) == environment or sys.exit("changes the environment")
import jshard.launch, jshard.train
assert "jax" not in sys.modules or sys.exit("imports JAX, which parents do not need")
import jax, jax.numpy, jax.nn, jax.random, jax.extend, flax.nnx, optax
names = "jax", "jax.lax", "jax.numpy", "jax.nn", "jax.random", "flax.nnx", "optax"
seen = lambda: {
    (module, name): (value, getattr(value, "__code__", None))
    for module in names for name, value in vars(sys.modules[module]).items()
    if not name.startswith("__")
}
def replaced(before):
    now = seen()
    return [key for key, value in before.items() if now.get(key) != value]
before = seen()
jshard.FSDP, jshard.nn
assert "orbax" not in sys.modules or sys.exit("imports orbax")
assert not replaced(before) or sys.exit(f"replaces {replaced(before)}")
print(len(jshard.make_mesh().devices.flat), jshard.Checkpointer.__name__)
print({names})
import orbax.checkpoint
before = seen()
for module in pkgutil.walk_packages(jshard.__path__, "jshard."):
    extras = "wandb", "mlflow", "evaluate.language_model"
    optional = any(extra in module.name for extra in extras)
    command = module.name == "jshard.generate" or "__main__" in module.name
    if not optional and not command:
        importlib.import_module(module.name)
print(replaced(before), len(before))
filters = logging.getLogger("jax._src.xla_bridge").filters
assert not filters or sys.exit("filters what JAX logs, outside of a command")
"""
LEADS_TO = (
    "nn.Split",
    "optim.per_layer",
    "functional.gather",
    "linen.Model",
    "training.early_stopping",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs Python where JAX finds a CUDA plugin, which finds no GPU."""
    if has_accelerator():
        pytest.skip("this machine has a GPU")
    tmp_path = tmp_path_factory.mktemp("plugin")
    (tmp_path / "r.py").write_text(RECIPE)
    (tmp_path / "jax_cuda12_plugin").mkdir()
    (tmp_path / "jax_cuda12_plugin/__init__.py").touch()
    plugin = tmp_path / "jax_plugins/xla_cuda12/__init__.py"
    plugin.parent.mkdir(parents=True)
    plugin.write_text(
        "import jax\n"
        "def initialize():\n"
        "    if 'cuda' in (jax.config.jax_platforms or 'cuda'):\n"
        "        raise RuntimeError('no CUDA')\n"
    )
    chosen = ("JAX_", "XLA_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(chosen)}
    environment["PYTHONPATH"] = f"{REPOSITORY}{os.pathsep}{tmp_path}"

    def run_python(*words: str, **chosen: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env=environment | chosen,
            capture_output=True,
            text=True,
            check=False,
        )

    return run_python


@pytest.fixture(scope="module")
def imported(run):
    """A process that has asked all of `WATCHED`."""
    names = ", ".join(f"jshard.{name}.__name__" for name in LEADS_TO)
    return run("-c", WATCHED.replace("{names}", names))


def test_importing_takes_no_time_starts_nothing_and_filters_nothing(imported):
    assert imported.returncode == 0, imported.stderr
    assert imported.stdout.splitlines()[0] == "1 Checkpointer"
    assert "RuntimeError: no CUDA" in imported.stderr  # as JAX says it


def test_importing_all_of_jshard_replaces_nothing_of_jax_flax_and_optax(imported):
    found, number = imported.stdout.splitlines()[2].rsplit(" ", 1)
    assert found == "[]"
    assert int(number) > 1000


@pytest.mark.slow  # above, that it is not hidden
def test_a_program_hears_of_a_failing_cuda_plugin_what_jax_says(run):
    program = "import jax; print(jax.devices())"
    done, without = run("-c", f"import jshard; {program}"), run("-c", program)
    assert "RuntimeError: no CUDA" in done.stderr
    assert done.stderr == without.stderr
    assert done.stdout == "[CpuDevice(id=0)]\n"


NOTE = "jshard: note: a CUDA plugin is installed but cannot be used ({}): computing on "
NOTE += "the CPU"
UNSEEN = "no GPU is visible, not even as /dev/nvidia0"


@pytest.mark.quick("nothing")
@pytest.mark.parametrize(
    ("chosen", "notes"),
    [
        ({}, [NOTE.format(UNSEEN)]),
        # Asked for GPUs, JAX says why there are none.
        ({"JAX_PLATFORMS": "cuda,cpu"}, [NOTE.format("no CUDA")]),
        ({"JAX_PLATFORMS": "cpu"}, []),  # the user knows
    ],
    ids=["nothing", "gpus", "cpus"],
)
def test_a_command_says_in_one_line_that_a_cuda_plugin_failed_and_why(
    chosen, notes, run
):
    done = run("-m", "jshard.train", "--config=r.py", "--config.stepz=3", **chosen)
    *said, error = done.stderr.splitlines()
    assert said == notes
    assert "did you mean steps?" in error
    assert done.returncode == 2


def test_dir_lists_the_public_names_alone():
    assert all(hasattr(jshard, name) for name in dir(jshard))
    namespace: dict[str, object] = {}
    exec("from jshard import *", namespace)
    assert {*dir(jshard)} <= {*namespace}
    with pytest.raises(AttributeError, match="no attribute 'Checkpointr'"):
        jshard.Checkpointr  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_type_checkers_see_what_is_imported_on_first_use():
    tree = ast.parse(_text(REPOSITORY / "jshard/__init__.py"))
    seen = {
        alias.name: getattr(getattr(jshard, alias.name), "__name__", "")
        if node.module == "jshard"
        else node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("jshard")
        for alias in node.names
    }
    homes: dict[str, str] = vars(jshard)["_HOMES"]
    modules = {name: f"jshard.{name}" for name in vars(jshard)["_MODULES"]}
    assert seen == modules | {name: f"jshard.{home}" for name, home in homes.items()}


def test_python_m_jshard_lists_every_command_in_a_line(run):
    done = run("-m", "jshard")
    assert (done.returncode, done.stderr) == (0, "")
    listed = re.findall(r"^  (\w+) +\w.+$", done.stdout, re.MULTILINE)
    package = REPOSITORY / "jshard"
    modules = {path.stem for path in package.glob("*.py") if "__main__" in _text(path)}
    packages = {path.parent.name for path in package.glob("*/__main__.py")}
    assert sorted(listed) == sorted((modules | packages) - {"__main__"})
    scripts = tomllib.loads(_text(REPOSITORY / "pyproject.toml"))["project"]["scripts"]
    assert set(scripts) == {f"jshard-{name}" for name in COMMANDS}
    for script in scripts.values():
        module, _, function = script.partition(":")
        file = REPOSITORY / f"{module.replace('.', '/')}.py"
        assert f"def {function}()" in _text(file)


@pytest.mark.quick("--nosuch")
@pytest.mark.parametrize("word", ["train", "--nosuch"])
def test_what_the_list_does_not_know_is_one_line(word, run):
    done = run("-m", "jshard", word)
    assert done.returncode == 2
    assert done.stderr.startswith("jshard: error: ")
    assert "python -m jshard" in done.stderr
    assert done.stderr.count("\n") == 1


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_the_top_level_is_small_and_leads_to_the_rest(imported):
    assert len(dir(jshard)) <= 29
    assert {"nn", "optim", "functional", "linen", "training"} <= {*dir(jshard)}
    listed = str(jshard.__doc__).partition("Each name")[0]  # help() begins with it
    public = {*dir(jshard)} - {"__version__"}
    assert {name for name in public if not re.search(rf"\b{name}\b", listed)} == set()
    names = [name.partition(".")[2] for name in LEADS_TO]
    assert imported.stdout.splitlines()[1].split() == names


@pytest.mark.parametrize("name", ["models", "recipes"])
def test_packaged_models_and_recipes_are_modules_of_jshard(name):
    folder = Path(jshard.__file__).parent / name
    stems = [file.stem for file in folder.glob("*.py")]
    assert "gpt" in stems
    for stem in stems:
        module = importlib.import_module(f"jshard.{name}.{stem}")
        assert Path(str(module.__file__)).parent == folder
        assert module.__doc__
