"""The host memory of an import and of an export: less than two of the files."""

import subprocess
import sys
from pathlib import Path

import pytest
from mapped import RECIPE, write_folder

from jobs import environment

SHARD = 160 * 10**6
SIZES = {"layers": 34, "width": 1024, "experts": 2}

# Devices' memory is this process's, too: what is on them does not count.
PEAK = """
import sys
from pathlib import Path

import jax

sys.path += {path!r}
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

def memory(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if what in line)
"""
IMPORT = """
from jshard.storage.checkpoint import stored_arrays as saving
from jshard.storage.checkpoint.checkpointer import Checkpointer
from jshard.storage.hub.safetensors_read import load_safetensors
from jshard.recipe.model_map import find_map
from mapped import abstract_state

folder = Path("hf")
job, config, abstract = abstract_state(Path("tiny.py"), **{"model.from": "hf"})
places = find_map(config, job.configured.recipe.huggingface, "tiny", folder)
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
loaded = load_safetensors(folder, abstract, places)
size = sum(array.nbytes for array in loaded.values())
print(size, memory("VmHWM") - before - size)

from jshard.storage.checkpoint import metadata

saving._CHUNK = 4 << 20  # small beside a file, as 256 MB are beside the usual 5 GB
state = job.fsdp.init(job.make_model, job.optimizer)
state = metadata.replace_arrays(state, loaded)
with Checkpointer("run/checkpoints") as checkpointer:
    checkpointer.save(state, config={"recipe": "tiny.py"} | config.to_dict())
"""
EXPORT = """
import flax, grain, ml_collections, optax  # the recipe's imports

from jshard import export

jax.devices()
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
sys.argv[1:] = ["run", "--output=out", "--format=huggingface", "--max_shard_size=64MB"]
export.main()
print(0, memory("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="not Linux")
def test_memory_stays_under_two_files(tmp_path):
    fixed, _ = added(tmp_path / "small", {"layers": 1, "width": 8, "experts": 2})
    found, files = added(tmp_path / "large", SIZES)
    assert files >= 8
    for what, bytes, beside in zip(("import", "export"), found, fixed, strict=True):
        print(
            f"{what}: {bytes / 1e6:.0f} MB added, {beside / 1e6:.0f} to a small model"
        )
        assert bytes - beside < 2 * SHARD, what


def added(folder: Path, sizes: dict[str, int]) -> tuple[list[int], int]:
    """The bytes that an import and an export add to a process, and the files."""
    folder.mkdir()
    (folder / "tiny.py").write_text(RECIPE)
    tensors = write_folder(folder / "hf", shard_bytes=SHARD, sizes=sizes)
    total = sum(array.nbytes for array in tensors.values())
    del tensors
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "helpers")]
    found = []
    for script in (IMPORT, EXPORT):
        done = subprocess.run(
            [sys.executable, "-c", PEAK.format(path=paths) + script],
            cwd=folder,
            env=environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        size, bytes = map(int, done.stdout.split("\n")[-2].split())
        assert size in (0, total)
        found.append(bytes)
    return found, len(list((folder / "hf").glob("*.safetensors")))
