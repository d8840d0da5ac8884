"""The host memory of an import and of an export: less than two of the files."""

import subprocess
import sys
from pathlib import Path

import pytest
from mapped import RECIPE, write_folder

from jobs import environment

SHARD = 64 * 10**6
SIZES = {"layers": 13, "width": 1024, "experts": 2}

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
from jshard.checkpoint.checkpointer import Checkpointer
from jshard.checkpoint.safetensors_read import load_safetensors
from jshard.training.huggingface import find_map
from mapped import abstract_state

folder = Path("hf")
job, config, abstract = abstract_state(Path("tiny.py"), **{"model.from": "hf"})
places = find_map(config, job.recipe.huggingface, "tiny", folder)
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
loaded = load_safetensors(folder, abstract, places)
size = sum(array.nbytes for array in loaded.values())
print(size, memory("VmHWM") - before - size)

from jshard.checkpoint import metadata

state = job.fsdp.init(job.make_model, job.optimizer)
state = metadata.replace_arrays(state, loaded)
with Checkpointer("run/checkpoints") as checkpointer:
    checkpointer.save(state, config={"recipe": "tiny.py"} | config.to_dict())
"""
EXPORT = """
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
    (tmp_path / "tiny.py").write_text(RECIPE)
    tensors = write_folder(tmp_path / "hf", shard_bytes=SHARD, sizes=SIZES)
    total = sum(array.nbytes for array in tensors.values())
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) >= 8
    del tensors
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    for script in (IMPORT, EXPORT):
        done = subprocess.run(
            [sys.executable, "-c", PEAK.format(path=folders) + script],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        size, added = map(int, done.stdout.split("\n")[-2].split())
        print(f"{total / 1e6:.0f} MB, {added / 1e6:.0f} MB added")
        assert size in (0, total)
        assert added < 2 * SHARD, f"{added / 1e6:.0f} MB"
