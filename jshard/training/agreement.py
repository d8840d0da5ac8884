"""Before the first step, all processes of a job compare what they are about to do."""

import base64
import hashlib
import json
import os
import re
import secrets
import sys
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jshard.data.iterables import Stream
from jshard.recipe.definition import Recipe
from jshard.recipe.load import own_modules
from jshard.system.compat.versions import versions
from jshard.system.errors import UserError
from jshard.system.jobs.peers import Peers
from jshard.system.network.secret import (
    SECRET_FILE,
    given_secret,
    new_secret,
    read_secret,
)
from jshard.training.run.start import Start

SHOWN = 3  # differences
_LONGEST = 120  # characters of a line of a program
# Settings of folders, logs, limits and devices, which may differ by process.
_OF_PROCESS = re.compile(
    "_dir$|cache|log|dump|timeout|traceback|address|visible|captured|pprint|platform"
    "|device|backend|topology|profil|pgle|proxy"
)
_DUMPS = ("--xla_dump", "--xla_gpu_dump")
PATIENCE = 15.0  # seconds; file systems cache that a file does not exist

Facts = Mapping[str, Mapping[str, str]]


def agree(peers: Peers, facts: Facts) -> None:
    """Compares the facts of all processes, short texts by kind and name.

    Raises:
      UserError: Some process differs from process 0; raised in all processes. Names
        the first such process and its first differences, with both values.
    """
    # Compressed to a tenth: gRPC limits a message to 4 MB.
    packed = base64.b85encode(zlib.compress(json.dumps(facts).encode())).decode()
    packed = peers.publish("facts", packed)
    theirs: Facts = json.loads(zlib.decompress(base64.b85decode(packed)))
    _check_equal(peers, _differences(facts, theirs))


def agree_on_program(peers: Peers, text: str) -> None:
    """Compares the program of a step, which all processes must run alike.

    Lines of callbacks are left out, as these have addresses of the process.

    Raises:
      UserError: Some process has another program than process 0; raised in all.
    """
    lines = [line for line in text.splitlines() if "callback" not in line]
    sums = np.array([zlib.crc32(line.encode()) for line in lines], "<u4")
    packed = base64.b85encode(sums.tobytes()).decode()
    theirs = np.frombuffer(base64.b85decode(peers.publish("program", packed)), "<u4")
    if np.array_equal(sums, theirs):
        difference = ""
    else:
        count = min(len(sums), len(theirs))
        unequal = np.flatnonzero(sums[:count] != theirs[:count])
        first = int(unequal[0]) if len(unequal) else count
        line = lines[first].strip() if first < len(lines) else "the end"
        difference = (
            f"its train step is another program, from line {first + 1} of "
            f"{len(lines)}: {line[:_LONGEST]}; is something in the recipe read from "
            "the process's own environment, clock or files?"
        )
    _check_equal(peers, difference)


def _check_equal(peers: Peers, difference: str) -> None:
    """Raises a UserError in all processes if one has a difference to process 0."""
    differences = peers.share("differences", difference)
    different = [index for index, text in enumerate(differences) if text]
    if different:
        first, *others = different
        more = f" (and {len(others)} more processes)" if others else ""
        raise UserError(
            f"process {first} differs from process 0{more}: {differences[first]}"
        )


def check_shared(peers: Peers, folder: Path) -> None:
    """Checks that all processes see the same folder, as checkpoints require.

    Raises:
      UserError: A process does not see what process 0 writes; raised in all processes.
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
            "(--config.checkpoint.every=0 trains without checkpoints)"
        )


def share_secret(peers: Peers, folder: Path) -> bytes:
    """Returns the job's secret, by which its processes know each other.

    If they were given none, process 0 makes one, which the others read in the folder.

    Raises:
      UserError: A process has none, or cannot read process 0's; raised in all
        processes.
    """
    secret = given_secret()
    if peers.count == 1:
        return secret or b""
    told = peers.share("has a secret", "" if secret is None else "x")
    if any(told):
        without = [index for index, text in enumerate(told) if not text]
        if without:
            raise UserError(
                f"process {without[0]} was given no secret, and others were: give all "
                f"the same {SECRET_FILE}"
            )
        assert secret is not None
        return secret
    file = folder / peers.publish("secret's file", f".secret-{secrets.token_hex(8)}")
    written = ""
    if peers.index == 0:
        try:
            mine = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with open(mine, "w") as opened:
                opened.write(new_secret())
        except OSError as error:
            written = f"{file}: {error.strerror}"
    if unwritten := peers.share("secret written", written)[0]:
        raise UserError(
            f"checkpoint.local: process 0 cannot write the job's secret: {unwritten}; "
            f"give all processes one by {SECRET_FILE}=FILE"
        )
    deadline = time.monotonic() + PATIENCE
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    secret, problem = b"", ""
    try:
        secret = read_secret(file, str(file))
    except UserError as error:
        problem = str(error)
    problems = peers.share("secret read", problem)
    if peers.index == 0:
        file.unlink()
    for index, problem in enumerate(problems):
        if problem:
            raise UserError(
                f"checkpoint.local: process {index} cannot read what process 0 writes: "
                f"{problem}; give all processes a secret by {SECRET_FILE}=FILE"
            )
    return secret


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


def facts_of_jax() -> Facts:
    """Returns what JAX is set to, and the devices, which all processes have alike."""
    devices = jax.local_devices()
    flags = os.environ.get("XLA_FLAGS", "").split()
    return {
        "jax.config": {
            name: repr(value)
            for name, value in jax.config.values.items()
            if not _OF_PROCESS.search(name)
        },
        "environment": {
            "XLA_FLAGS": " ".join(x for x in flags if not x.startswith(_DUMPS))
        },
        "devices": {"number": str(len(devices)), "kind": devices[0].device_kind},
    }


def facts_of(
    recipe: Recipe,
    config: Mapping[str, Any],
    workdir: str,
    start: Start,
    state: Any,
    datasets: Mapping[str, Any],
) -> Facts:
    """Returns what must be the same in all processes of a job.

    `config` has all keys, flattened; `state` may be abstract, and `datasets` holds None
    for an unused split.
    """
    checkpoint = start.checkpoint.name if start.checkpoint else "none"
    return {
        "--workdir": {"": workdir},
        "config": {key: repr(value) for key, value in config.items()},
        "package": versions(),
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
    """Returns digests of jshard, the recipe, and the modules beside it."""
    package = Path(__file__).parents[1]
    linked = (package / "models", package / "recipes")  # which rglob does not follow
    found = {file for folder in (package, *linked) for file in folder.rglob("*.py")}
    jshard = hashlib.sha256()
    for file in sorted(found):
        jshard.update(file.relative_to(package).as_posix().encode())
        jshard.update(file.read_bytes())
    files = {}
    if recipe.file is not None:
        files = {recipe.file.name: recipe.file, **own_modules(recipe.file)}
    digests = {
        name: hashlib.sha256(file.read_bytes()).hexdigest()[:12]
        for name, file in files.items()
    }
    return {"of jshard": jshard.hexdigest()[:12], **digests}


def _data(split: str, data: Any) -> dict[str, str]:
    """Returns the number of examples, and digests of four of them; a stream's kind."""
    if isinstance(data, Stream):
        return {f"{split} examples": data.kind}
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
