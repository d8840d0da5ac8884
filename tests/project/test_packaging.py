"""What a user installs: types, licences, the conda recipe, workflows."""

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import jshard

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "tests" / "helpers" / "typed_example.py"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def licences() -> ModuleType:
    file = REPOSITORY / "docs" / "licences.py"
    spec = importlib.util.spec_from_file_location("licences", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nothing_that_is_installed_is_copyleft(licences):
    found = licences.licences()
    assert {"jax", "flax", "grain", "orbax-checkpoint"} <= found.keys()
    assert not {n: text for n, text in found.items() if licences.COPYLEFT.search(text)}
    assert "not stated" not in found.values()


def test_copyleft_is_seen(licences):
    for text in ("GPL-3.0-or-later", "GNU General Public License v3", "MPL-2.0"):
        assert licences.COPYLEFT.search(text)


def test_the_conda_recipe_is_of_this_project():
    recipe = yaml.safe_load((REPOSITORY / "conda/recipe.yaml").read_text())
    assert recipe["package"]["version"] == jshard.__version__
    assert recipe["build"]["python"]["entry_points"] == [
        f"{name} = {place}" for name, place in PROJECT["scripts"].items()
    ]
    needed = [text.replace(" ", "") for text in recipe["requirements"]["run"]]
    assert needed == [
        f"python{PROJECT['requires-python']}",
        *(text.lower() for text in PROJECT["dependencies"]),
    ]


@pytest.mark.parametrize(
    "file",
    [
        *(REPOSITORY / ".github").rglob("*.yml"),
        REPOSITORY / "CITATION.cff",
        REPOSITORY / "conda/recipe.yaml",
    ],
    ids=lambda file: file.name,
)
def test_files_for_services_are_yaml(file):
    content = yaml.safe_load(file.read_text())
    if file.parent.name == "workflows":
        steps = [s for job in content["jobs"].values() for s in job.get("steps", ())]
        assert any(re.search(r"jshard|\.ci/run|pytest", str(step)) for step in steps)
        assert content["permissions"] == {"contents": "read"}


def test_a_tag_publishes_wheel_container_and_site_after_every_test():
    file = REPOSITORY / ".github/workflows/publish.yml"
    workflow = yaml.safe_load(file.read_text())
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML reads "on" as True
    jobs = workflow["jobs"]
    assert jobs["whole"]["uses"] == "./.github/workflows/whole.yml"
    assert jobs["build"]["needs"] == "whole"
    published = {
        "pypi": "pypa/gh-action-pypi-publish",
        "container": "docker push",
        "site": "actions/deploy-pages",
    }
    for name, step in published.items():
        assert jobs[name]["needs"] == "build"
        assert step in str(jobs[name]["steps"])


def test_pages_name_the_versions_that_are_supported():
    page = (REPOSITORY / "docs/reference/versions.md").read_text()
    wheel = yaml.safe_load((REPOSITORY / ".github/workflows/ci.yml").read_text())
    pythons = wheel["jobs"]["wheel"]["strategy"]["matrix"]["python"]
    assert f"| Python | {pythons[0]} to {pythons[-1]} |" in page
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    (jax,) = (x for x in PROJECT["dependencies"] if x.startswith("jax>="))
    assert f"| JAX | {jax.removeprefix('jax>=')} to " in page


def test_the_image_installs_extras_that_exist():
    text = (REPOSITORY / "Dockerfile").read_text()
    [extras] = re.findall(r"\.whl\)\[([\w,]+)\]", text)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()


def test_the_typed_example_is_the_readme_s():
    readme = (REPOSITORY / "README.md").read_text()
    lines = readme[readme.index("optimizer = optax.adamw") :].partition("```")[0]
    typed = EXAMPLE.read_text()
    for line in lines.splitlines():
        assert line.partition("  #")[0] in typed


MISTAKES = """import jshard

jshard.Policy(remat="dosts")
jshard.Policy(remat=jshard.Names("attended"))
jshard.Policy(offload="optimiser")
jshard.Policy(precision=jshard.Precision(products="fp8"))
jshard.Policy(remat_="full")
jshard.Trainer("gpt.py").fit(steps=3)
"""


@pytest.mark.slow
def test_a_user_s_pyright_is_strict(tmp_path):
    done = checked_by_pyright(tmp_path, EXAMPLE.read_text())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_user_s_pyright_finds_settings_that_do_not_exist(tmp_path):
    done = checked_by_pyright(tmp_path, MISTAKES)
    lines = re.findall(r"main\.py:(\d+):\d+ - error", done.stdout)
    assert [int(line) for line in dict.fromkeys(lines)] == [3, 5, 6, 7, 8], done.stdout


def checked_by_pyright(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Where jshard is installed, by what is installed; else by this checkout."""
    pyright = Path(sys.executable).with_name("pyright")
    if not pyright.exists():
        pytest.skip("pyright is not installed")
    assert (Path(jshard.__file__).parent / "py.typed").exists()
    (folder / "main.py").write_text(program)
    config: dict[str, object] = {"include": ["main.py"], "typeCheckingMode": "strict"}
    config["reportMissingTypeStubs"] = False  # of optax, which has no types
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    command = [pyright, "--pythonpath", sys.executable, "--project", folder]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.slow
def test_the_typed_example_runs():
    command = [sys.executable, EXAMPLE]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
