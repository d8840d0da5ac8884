"""What the hashes of arrays take of saves and restores: both with and without, in turn.

    python benchmarks/checkpoint_hashes.py --repeats=5

The state is a GPT's with AdamW's moments, on 8 virtual CPU devices; files stay in the
page cache. "compiled" is the program that GPUs run, here on CPUs.
"""

import argparse
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import jax

from checkpoints import Setup, Table  # also makes the devices
from jshard.storage.checkpoint import array_bits, checkpointer, metadata
from jshard.storage.checkpoint.checkpointer import Checkpointer, Save


def main() -> None:
    """Prints a table of seconds."""
    parser = argparse.ArgumentParser(description="Times hashes of checkpoints.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--sequence", type=int, default=64)
    setup = Setup(parser.parse_args())
    table, saves, state = Table(), list[Save](), setup.state()
    arrays = metadata.arrays_by_name(state)
    shapes = {name: x.shape for name, x in metadata.exact_by_name(state).items()}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for i in range(setup.options.repeats + 1):
            for how in ("with hashes", "without"):
                none = mock.Mock(return_value={})
                hashes = array_bits.hashes_of if how != "without" else none
                with (
                    mock.patch.object(checkpointer, "hashes_of", hashes),
                    mock.patch.object(array_bits, "hashes_of", hashes),
                    Checkpointer(work / how, report=saves.append) as ours,
                ):
                    ours.save(state)
                    ours.wait()
                    if i:  # the first one imports
                        table.add(f"save, {how}: blocked", saves[-1].blocked)
                        table.add(f"save, {how}: until whole", saves[-1].took)
                        what = f"restore, {how}"
                        table.time(what, ours.restore, setup.abstract)
                shutil.rmtree(work / how)
            if i:
                table.time("hashes alone", array_bits.hashes_of, arrays, shapes)
            with mock.patch.object(array_bits, "platform", return_value="gpu"):
                what = "hashes alone, compiled" if i else "hashes alone, compiling"
                table.time(what, array_bits.hashes_of, arrays, shapes)
    print(f"jax {jax.__version__}; {len(arrays)} arrays, {setup.size / 2**30:.2f} GiB")
    table.print("8 devices of a CPU", setup.size)


if __name__ == "__main__":
    main()
