"""A search on the terminal: its progress and result."""

from collections.abc import Callable, Iterable, Iterator

from jshard.plan.search.candidates import CHANGING_KNOBS, DEFAULT_KNOBS, Candidate
from jshard.plan.search.outcomes import Outcome, Search
from jshard.system.cli.terminal import show
from jshard.system.formatting import format_bytes, one_line

_CHANGING = (*CHANGING_KNOBS, "policy.precision.sum")


def report(done: int, total: int, topology: str, outcome: Outcome) -> None:
    """Prints a line about a candidate to standard error."""
    line = f"failed: {outcome.candidate}: {outcome.error}"
    if not outcome.error:
        figures = f"{outcome.rate:,.0f}/s in {format_bytes(outcome.memory)}"
        notes = " (cached)" * outcome.cached + " (does not fit)" * (not outcome.fits)
        line = f"{figures}: {outcome.candidate}{notes}"
    show(one_line(f"[{done}/{total}] {topology}: {line}"), error=True)


def lines(
    found: Search, command: Callable[[Candidate], str], allowed: Iterable[str]
) -> Iterator[str]:
    """Yields the Pareto set with command lines, and counts of all candidates."""
    if found.best:
        yield f"No other candidate has more {found.unit}/s in as little memory:"
        yield ""
        yield (
            f"  {found.unit + '/s':>12}  {'MFU':>6}  {'step':>9}  {'exposed':>7}  "
            f"{'memory':>10}  {'host':>10}"
        )
        for outcome in found.best:
            yield _row(outcome)
            yield f"      {command(outcome.candidate)}"
        if any(_changes(outcome.candidate) for outcome in found.best):
            yield "  * changes the computation"
        yield ""
        yield from _as_given(found)
    else:
        yield from _closest(found, command, allowed)
    yield from _counts(found)


def _row(outcome: Outcome) -> str:
    mfu = "" if outcome.mfu is None else f"{outcome.mfu:.1%}"
    host = format_bytes(outcome.host) if outcome.host else "-"
    mark = "*" if _changes(outcome.candidate) else " "
    return (
        f"{mark} {outcome.rate:>12,.0f}  {mfu:>6}  {outcome.seconds * 1e3:>6,.0f} ms  "
        f"{outcome.exposed / outcome.seconds:>7.1%}  "
        f"{format_bytes(outcome.memory):>10}  {host:>10}"
    )


def _changes(candidate: Candidate) -> bool:
    """Whether it changes the computation, as any key listed by the user may."""
    return any(
        key in _CHANGING or not key.startswith(("policy.", "mesh."))
        for key in candidate.settings
    )


def _as_given(found: Search) -> Iterator[str]:
    """Compares the config as given with the fastest."""
    for outcome in found.outcomes:
        if not outcome.candidate.settings and not outcome.error:
            gain = found.best[0].rate / outcome.rate - 1
            beaten = f"which the fastest beats by {gain:.1%}"
            yield f"As given, {beaten if outcome.fits else 'it does not fit'}:"
            yield _row(outcome)
            yield ""


def _closest(
    found: Search, command: Callable[[Candidate], str], allowed: Iterable[str]
) -> Iterator[str]:
    """Names the candidate that is closest to fitting, and what would help."""
    needs = [(o.memory, o.candidate, "") for o in found.outcomes if not o.error]
    needs += [(bound, c, "at least ") for c, bound in found.too_large]
    yield f"Nothing fits: a GPU has {format_bytes(found.usable)} for a program."
    if needs:
        memory, closest, least = min(needs, key=lambda need: need[0])
        yield f"The closest needs {least}{format_bytes(memory)}:"
        yield f"  {command(closest)}"
    free = [knob for knob in DEFAULT_KNOBS if knob not in allowed]
    also = f", or --search of more: {', '.join(free)}" if free else ""
    more = ", or a higher --limit" if found.untried else ""
    yield f"What would help: more GPUs, GPUs with more memory{also}{more}."
    yield ""


def _counts(found: Search) -> Iterator[str]:
    cached = sum(outcome.cached for outcome in found.outcomes)
    compiled = len(found.outcomes) - cached - len(found.failed)
    yield (
        f"{found.considered} candidates: {compiled} compiled, {cached} from the "
        f"cache, {len(found.failed)} failed, {len(found.refused)} impossible, "
        f"{len(found.too_large)} cannot fit by arithmetic, {len(found.untried)} not "
        "tried (less promising)"
    )
    yield from (f"  failed: {o.candidate}: {o.error}" for o in found.failed)
    reasons = dict.fromkeys(reason for _, reason in found.refused)
    yield from (f"  impossible: {reason}" for reason in reasons)
