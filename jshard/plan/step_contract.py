"""Contracts: what a compiled step sends and needs, in a file that holds it to that."""

import collections
import functools
import json
import os
import re
from pathlib import Path
from typing import Any

import jax

from jshard.plan import hlo
from jshard.plan.cost.traffic import transfers
from jshard.plan.fit.device_memory import compiled_bytes
from jshard.plan.memory.breakdown import Memory
from jshard.plan.memory.live_values import aliases
from jshard.plan.memory.owners import memory_by_owner, owners
from jshard.plan.planning import Plan
from jshard.system.errors import UserError
from jshard.system.files.atomic import replace_file
from jshard.system.files.untrusted import read_json
from jshard.system.formatting import format_bytes, format_seconds

UPDATE = "JSHARD_UPDATE_CONTRACTS"
_FORMAT = 2
_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for folder in (Path(jax.__file__).parent, Path(__file__).parents[1])
)

_Facts = dict[str, Any]


def assert_plan(
    step: Plan | jax.stages.Compiled, contract: str | Path, *, tolerance: float = 0.02
) -> None:
    """Checks that a compiled step is what a contract says, without running it.

    Collectives must be the same: kind, dtype, number of devices, how often each runs
    and what a device receives. Memory, by who owns it, and of a plan for known GPUs the
    time of the step, may grow by ``tolerance``; no donated argument may be lost.

    With the environment variable ``JSHARD_UPDATE_CONTRACTS=1`` the contract is written
    in place of that.

    Args:
      step: What ``jax.jit(...).lower(...).compile()`` or ``train_step.lower(...)
        .compile()`` returns, of arrays or ``jax.ShapeDtypeStruct``; or a recipe's plan.
      contract: A JSON file, which belongs into the repository.
      tolerance: Of memory and time, relative.

    Raises:
      AssertionError: They differ; it says which collectives, where they come from, and
        what grew.
      UserError: There is no contract, it is damaged, or of other devices.
    """
    path, now = Path(contract), facts_of(step)
    if os.environ.get(UPDATE, "0") != "0":
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps(now, indent=1, sort_keys=True) + "\n")
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from error
        return
    kept = _read(path)
    if kept["devices"] != now["devices"]:
        raise UserError(
            f"{path}: this contract is of {kept['devices']}, and the step is compiled "
            f"for {now['devices']}: give each its own file"
        )
    found = [
        *_sent(kept, now, _lines(_text(step))),
        *_lost(kept["donated"], now["donated"]),
        *_grown(kept, now, tolerance, {x.name: x.what for x in _memory(step).parts}),
    ]
    if found:
        other = f" (of JAX {kept['jax']}, and this is {now['jax']})"
        raise AssertionError(
            f"{path}{other * (kept['jax'] != now['jax'])}: the step is not what this "
            "contract says:\n"
            + "\n".join(found)
            + f"\nIf that is intended, write it again with {UPDATE}=1."
        )


def facts_of(step: Plan | jax.stages.Compiled) -> _Facts:
    """Returns what a contract holds of a step.

    Raises:
      UserError: It is neither a plan nor a compiled program.
    """
    text = _text(step)
    header = text.partition("\n")[0]
    facts: _Facts = {"format": _FORMAT, "jax": jax.__version__}
    shares, memory = None, _memory(step)
    facts["memory"] = {part.name: part.bytes for part in memory.parts}
    facts["memory"]["total"] = memory.total
    if isinstance(step, Plan):
        number, kind = step.devices, step.device_kind
        if step.timeline is not None:
            facts["seconds"] = step.timeline.seconds
        module = step.module
        stage = 0 if step.timeline is None else step.timeline.stage
        if step.pipeline is not None:  # the traffic of a device of one stage
            shares = functools.partial(step.pipeline.shares, device=stage)
    else:
        shardings = jax.tree.leaves((step.input_shardings, step.output_shardings))
        devices = list(max((x.device_set for x in shardings), key=len, default=()))
        number = len(devices)
        kind = devices[0].device_kind if devices else ""
        module = hlo.parse(text)
    facts["devices"] = f"{number} x {kind}" if number else "none"
    taken = set(aliases(header).values())
    facts["donated"] = {
        name: sum(x.number in taken for x in group)
        for name, group in owners(module).items()
    }
    facts["collectives"] = _collectives(module, number, shares)
    return facts


def _memory(step: Plan | jax.stages.Compiled) -> Memory:
    if isinstance(step, Plan):
        return step.memory
    text = _text(step)
    return memory_by_owner(hlo.parse(text), text, 1, None, compiled_bytes(step))


def _text(step: Plan | jax.stages.Compiled) -> str:
    if isinstance(step, Plan):
        return step.text
    if isinstance(step, jax.stages.Compiled):
        return step.as_text() or ""
    raise UserError(
        f"assert_plan: step is a {type(step).__name__}: give a plan, or what "
        "jax.jit(function).lower(*arguments).compile() returns"
    )


def _collectives(module: hlo.Module, number: int, shares: Any) -> _Facts:
    """Counts collectives by what they are, and by where they come from."""
    runs: dict[str, dict[str, float]] = collections.defaultdict(
        lambda: collections.defaultdict(float)
    )
    received: dict[str, float] = collections.defaultdict(float)
    for x, moved, times in transfers(module, module.entry, number, number, shares):
        if moved.group > 1:
            dtype = "+".join(sorted({name for name, _ in moved.dtypes}))
            kind = f"{moved.kind} {dtype} over {moved.group} devices"
            runs[kind][x.source.partition("/")[2] or x.name] += times
            received[kind] += times * moved.wire_bytes
    return {
        kind: {
            "count": round(sum(where.values())),
            "bytes": round(received[kind]),
            "at": {name: round(times) for name, times in where.items()},
        }
        for kind, where in runs.items()
    }


def _read(path: Path) -> _Facts:
    try:
        kept: Any = read_json(path)
    except FileNotFoundError as error:
        raise UserError(
            f"{path}: there is no such contract; write it with {UPDATE}=1"
        ) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError:
        kept = None
    if not _is_contract(kept):
        raise UserError(f"{path}: is no contract; write it again with {UPDATE}=1")
    return kept


def _is_contract(kept: Any) -> bool:
    def is_number(x: Any) -> bool:
        return isinstance(x, int | float) and not isinstance(x, bool)

    def are_numbers(x: Any) -> bool:
        return isinstance(x, dict) and all(map(is_number, x.values()))

    def is_collective(x: Any) -> bool:
        counts = isinstance(x, dict) and {k: v for k, v in x.items() if k != "at"}
        return (
            bool(counts)
            and {*x} == {"count", "bytes", "at"}
            and (are_numbers(counts) and are_numbers(x["at"]))
        )

    return (
        isinstance(kept, dict)
        and kept.get("format") == _FORMAT
        and isinstance(kept.get("jax"), str)
        and isinstance(kept.get("devices"), str)
        and are_numbers(kept.get("donated"))
        and is_number(kept.get("seconds", 0))
        and are_numbers(kept.get("memory"))
        and isinstance(kept.get("collectives"), dict)
        and all(map(is_collective, kept["collectives"].values()))
    )


def _sent(kept: _Facts, now: _Facts, lines: dict[str, str]) -> list[str]:
    """Says which collectives differ, and where these come from."""
    found = []
    none: _Facts = {"count": 0, "bytes": 0, "at": {}}
    for kind in sorted({*kept["collectives"], *now["collectives"]}):
        before = kept["collectives"].get(kind, none)
        after = now["collectives"].get(kind, none)
        if (before["count"], before["bytes"]) == (after["count"], after["bytes"]):
            continue
        sizes = f"{format_bytes(before['bytes'])} -> {format_bytes(after['bytes'])}"
        found.append(
            f"- {kind}: {before['count']:g} -> {after['count']:g} per step, {sizes} "
            "per device"
        )
        for where in sorted({*before["at"], *after["at"]}):
            was, runs = before["at"].get(where, 0), after["at"].get(where, 0)
            if was != runs:
                line = f" ({lines[where]})" if runs and where in lines else ""
                found.append(f"    {where}{line}: {was:g} -> {runs:g}")
    return found


def _lost(kept: dict[str, int], now: dict[str, int]) -> list[str]:
    """Says which arguments' memory results no longer take over."""
    return [
        f"- donated arguments of {name}, whose memory results take over: {before:g} -> "
        f"{now.get(name, 0)}"
        for name, before in kept.items()
        if now.get(name, 0) < before
    ]


def _grown(
    kept: _Facts, now: _Facts, tolerance: float, what: dict[str, str]
) -> list[str]:
    """Says what memory and time grew by more than the tolerance, and what it holds."""
    found = []
    least = tolerance * kept["memory"].get("total", 0)
    for name, after in now["memory"].items():
        before = kept["memory"].get(name, 0)
        if after - before > (least if name != "total" else tolerance * before):
            holds = f" ({what[name]})" if name in what else ""
            found.append(
                f"- memory per device, {name}: {format_bytes(round(before))} -> "
                f"{format_bytes(after)}{holds}"
            )
    before, after = kept.get("seconds"), now.get("seconds")
    if before and after and after > before * (1 + tolerance):
        found.append(
            f"- predicted step: {format_seconds(before)} -> {format_seconds(after)}"
        )
    return found


def _lines(text: str) -> dict[str, str]:
    """Returns the line of the user's, by the source of the instructions it makes."""
    tables = {name: {} for name in ("FileNames", "FileLocations", "StackFrames")}
    rows: dict[str, str] = {}
    for line in text.splitlines():
        if line.isidentifier():  # the name of a table
            rows = tables.get(line, {})
        elif row := re.match(r'(\d+) ["{](.*)["}]$', line):
            rows[row[1]] = row[2]
        elif line.startswith("%"):
            break

    def number(row: str, name: str) -> str:
        found = re.search(rf"\b{name}=(\d+)", row)
        return found[1] if found else ""

    def line_of(frame: str) -> str:
        while row := tables["StackFrames"].get(frame):
            place = tables["FileLocations"].get(number(row, "file_location_id"), "")
            file = tables["FileNames"].get(number(place, "file_name_id"), "")
            if file and not file.startswith(_LIBRARIES):
                return f"{Path(file).name}:{number(place, 'line')}"
            above = number(row, "parent_frame_id")
            frame = above if above != frame else ""
        return ""

    found = {}
    for source, frame in re.findall(r'op_name="([^"]*)" stack_frame_id=(\d+)', text):
        where = source.partition("/")[2]
        if where not in found and (line := line_of(frame)):
            found[where] = line
    return found
