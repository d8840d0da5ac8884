"""Before the first step: all processes of a job compare what they are about to do."""

import base64
import hashlib
import json
import secrets
import sys
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jshard.distributed import Peers
from jshard.errors import UserError
from jshard.formatting import versions
from jshard.training.config.config import Config, flatten
from jshard.training.recipe import OWN_PACKAGES, Recipe
from jshard.training.run_folder.start import Start

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "grain", "orbax-checkpoint")
SHOWN = 3  # differences
PATIENCE = 15.0  # seconds, for file systems that remember what was not there

Facts = Mapping[str, Mapping[str, str]]


def agree(peers: Peers, facts: Facts) -> None:
    """Compares facts with those of all processes.

    Args:
      peers: the processes.
      facts: of this one, by kind ("config", ...) and name, as short texts.

    Raises:
      UserError: the facts of a process differ from those of process 0; in all
        processes, with the process, the first differences and both values.
    """
    theirs = _unpack(peers.publish("facts", _pack(facts)))
    differences = _differences(facts, theirs)
    found = peers.share("differences", differences)
    other = {index: text for index, text in enumerate(found) if text}
    if other:
        first = next(iter(other))
        more = f" (and {len(other) - 1} more processes)" if len(other) > 1 else ""
        raise UserError(f"process {first} differs from process 0{more}: {other[first]}")


def check_shared(peers: Peers, folder: Path) -> None:
    """Checks that all processes see one and the same folder, as checkpoints need.

    Args:
      peers: the processes; each has made the folder already.
      folder: of this process.

    Raises:
      UserError: a process does not see what process 0 writes; in all processes.
    """
    file = folder / peers.publish("shared", f".shared-{secrets.token_hex(8)}")
    if peers.index == 0:
        file.touch()
    peers.share("written", "")
    deadline = time.monotonic() + PATIENCE
    while not (seen := file.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    blind = [i for i, text in enumerate(peers.share("seen", "x" * seen)) if not text]
    if peers.index == 0:
        file.unlink()
    if blind:
        raise UserError(
            f"process {blind[0]} does not see what process 0 writes in --workdir: "
            "checkpoints need a file system that all hosts share "
            "(--config.checkpoint.every=0 trains without any)"
        )


def _pack(facts: Facts) -> str:
    """As a text of a tenth the size: a note must stay below gRPC's 4 MB."""
    return base64.b85encode(zlib.compress(json.dumps(facts).encode())).decode()


def _unpack(text: str) -> Facts:
    return json.loads(zlib.decompress(base64.b85decode(text)))


def _differences(mine: Facts, theirs: Facts) -> str:
    texts = []
    for kind, facts in mine.items():
        others = theirs.get(kind, {})
        for name in {**facts, **others}:
            here, there = facts.get(name, "absent"), others.get(name, "absent")
            if here != there:
                texts.append(f"{kind} {name}: {here}, not {there}")
    more = f"; and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return "; ".join(texts[:SHOWN]) + more


def facts_of(
    recipe: Recipe,
    config: Config,
    workdir: Path,
    start: Start,
    state: Any,
    datasets: Mapping[str, Any],
) -> Facts:
    """What must be the same in all processes of a job.

    Args:
      recipe: what to train.
      config: with every shared key.
      workdir: the run's folder.
      start: where the run starts.
      state: the abstract state.
      datasets: by split; None where a split is not used.
    """
    checkpoint = start.checkpoint.name if start.checkpoint else "none"
    return {
        "--workdir": {"": str(workdir)},
        "config": {key: repr(value) for key, value in flatten(config).items()},
        "package": versions(PACKAGES),
        "code": _code(recipe),
        "parameter": {
            jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}"
            for path, x in jax.tree_util.tree_leaves_with_path(state)
        },
        "checkpoint": {"to start from": checkpoint, "at step": str(start.step)},
        "data": {
            name: fact
            for split, data in datasets.items()
            if data is not None
            for name, fact in _data(split, data).items()
        },
    }


def _code(recipe: Recipe) -> dict[str, str]:
    """Digests of jshard, and of the recipe with what it imports of its own."""
    package = Path(__file__).parents[1]
    recipes = package / "recipes"  # of a wheel; the one that runs is told below
    whole = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        if recipes in file.parents:
            continue
        whole.update(file.relative_to(package).as_posix().encode())
        whole.update(file.read_bytes())
    digests = {
        "of jshard": whole.hexdigest()[:12],
        recipe.file.name: _digest(recipe.file),
    }
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and name.partition(".")[0] in OWN_PACKAGES:
            digests[name] = _digest(Path(file))
    return digests


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]


def _data(split: str, data: Any) -> dict[str, str]:
    """How many examples there are, and digests of some from first to last."""
    count = len(data)
    endless = count == sys.maxsize
    last = 2**20 if endless else count - 1
    found = {f"{split} examples": "endless" if endless else str(count)}
    places = {"first": 0, "early": last // 3, "middle": last // 2, "last": last}
    for place, index in places.items() if count else ():
        digest = hashlib.sha256()
        for path, x in jax.tree_util.tree_leaves_with_path(data[index]):
            array = np.asarray(x)
            digest.update(f"{path} {array.dtype} {array.shape}".encode())
            digest.update(array.tobytes())
        found[f"{split}, {place} example"] = digest.hexdigest()[:12]
    return found
