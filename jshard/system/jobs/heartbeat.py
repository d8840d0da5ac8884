"""Heartbeats: when one process of a job fails, all end and report which one it was.

Twice a second every process writes a beat with its place, such as "step 12 (data)", to
the key-value store. Process 0 reads all beats and publishes a verdict: continue or end.
The other processes read only that, which keeps process 0's load low in large jobs. A
process that cannot read the verdict ends by itself.

This runs in threads, as the main thread may be stuck in a collective.
"""

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping

import jax

from jshard.system.compat.coordination import KeyValueStore
from jshard.system.jobs.status import GRACE, PERIOD, SILENCE, report
from jshard.system.jobs.stuck import UNKNOWN

SHOWN = 8  # places in a message


@dataclasses.dataclass(frozen=True)
class Beat:
    """A sign of life of one process."""

    number: int
    moves: int  # how often the process has changed its place
    place: str  # what it is doing, for the user
    patience: float = UNKNOWN  # seconds that it may stay at this place
    finished: bool = False  # whether it is ready to leave the job


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What process 0 publishes."""

    number: int = 0  # of process 0's beat
    places: str = ""  # where all processes are, for the user
    finished: bool = False  # whether all are ready to leave the job
    code: int | None = None  # exit code to end with, or None to continue
    why: str = ""  # why the job ends


@dataclasses.dataclass
class Record:
    """What process 0 knows of a process; times are of `time.monotonic()`."""

    heard: float  # when its last beat came
    moved: float  # when it last changed its place
    beat: Beat = Beat(0, -1, "its start")

    def update(self, beat: Beat, now: float) -> None:
        """Records a beat, which may be the same as before."""
        if beat.moves != self.beat.moves:
            self.moved = now
        if beat.number != self.beat.number:
            self.heard = now
        self.beat = beat


def judge(records: Mapping[int, Record], now: float, silence: float) -> str | None:
    """Returns why a job must end, or None if it can continue.

    More than `silence` seconds without a beat end it; `now` is of `time.monotonic()`.
    """
    active = {i: r for i, r in records.items() if not r.beat.finished}
    silent = [i for i, r in active.items() if now - r.heard > silence]
    if silent:
        return (
            f"error: {format_processes(silent)} gave no sign of life for {silence:g} s "
            "(killed, stopped, or cut off); last reported: "
            f"{format_places(records)}"
        )
    if active and all(now - r.moved > r.beat.patience for r in active.values()):
        seconds = int(now - max(r.moved for r in active.values()))
        moves = {i: r.beat.moves for i, r in active.items()}
        least, waiting = min(moves.values()), ""
        if least < max(moves.values()):  # processes in step make equally many moves
            late = format_processes(i for i, n in moves.items() if n == least)
            waiting = f"the others wait for {late}: "
        return (
            f"error: {waiting}no process made progress for {seconds} s (watch.stuck); "
            f"last reported: {format_places(records)}; the logs have the Python stacks"
        )
    return None


def format_processes(numbers: Iterable[int]) -> str:
    """Returns text like "process 1" or "processes 0-3 and 7"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs]
    several = len(texts) > 1 or "-" in texts[0]
    text = " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))
    return f"{'processes' if several else 'process'} {text}"


def format_places(records: Mapping[int, Record]) -> str:
    """Returns text like "process 1 at step 11 (data), processes 0 and 2 at ..."."""
    at: dict[str, list[int]] = {}
    for number, record in records.items():
        at.setdefault(record.beat.place, []).append(number)
    # The smallest group first: usually it is the one that matters.
    groups = sorted(at.items(), key=lambda item: len(item[1]))
    texts = [f"{format_processes(numbers)} at {place}" for place, numbers in groups]
    more = [f"{len(texts) - SHOWN} other places"] if len(texts) > SHOWN else []
    return ", ".join(texts[:SHOWN] + more)


class Heartbeat:
    """The threads that send beats, judge them and guard one process.

    Attributes:
      silence: seconds without a sign of life after which the job ends.
      verdict: the last one read.
    """

    def __init__(
        self,
        store: KeyValueStore,
        index: int,
        count: int,
        end: Callable[[int, str, bool], None],
    ):
        """Starts the threads.

        Args:
          store: carries beats and verdicts.
          index: rank of this process.
          count: number of processes.
          end: called in a thread to end this process, with an exit code, a reason, and
            whether that is process 0's verdict.
        """
        now = time.monotonic()
        self.silence = SILENCE
        self.verdict = Verdict()
        self._store, self._index, self._end = store, index, end
        self._number = 0
        self._beat = Beat(0, 0, "the start")  # without its number
        self._records = {i: Record(now, now) for i in range(count)}
        self._heard = now  # when process 0 gave its last sign of life
        self._over = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._run, args=[x], name=f"jshard{x.__name__}", daemon=True
            )
            for x in (self._judge if index == 0 else self._listen, self._guard)
        ]
        for thread in self._threads:
            thread.start()

    def at(self, place: str, patience: float) -> None:
        """Sets where this process is and how many seconds it may stay there."""
        self._beat = Beat(0, self._beat.moves + 1, place, patience)

    def fail(self, code: int, why: str) -> None:
        """Asks process 0 to end the job."""
        note = json.dumps({"code": code, "why": why})
        self._store.put(f"failed/{self._index}", note)

    def leave(self, timeout: float | None = None) -> bool:
        """Waits until all processes are ready to leave, and ends the threads.

        Returns whether they are; after so many seconds, if given, it waits no longer.
        """
        self._beat = Beat(0, self._beat.moves + 1, "the end", finished=True)
        began = time.monotonic()
        while not self.verdict.finished:
            if timeout is not None and time.monotonic() - began > timeout:
                return False
            time.sleep(PERIOD / 10)
        self._over.set()
        for thread in self._threads:
            # One still in JAX's client when Python ends would abort the process.
            thread.join(GRACE)
        return True

    def wait_for_others(self) -> None:
        """In process 0, returns when all live processes have read that the job ends."""
        deadline = time.monotonic() + GRACE
        recent = time.monotonic() - self.silence / 2
        living = {i for i, r in self._records.items() if i and r.heard > recent}
        while time.monotonic() < deadline:
            if living <= {int(name) for name in self._store.all_in("ended")}:
                return
            time.sleep(PERIOD / 10)

    def _run(self, once: Callable[[], None]) -> None:
        while True:
            before = time.monotonic()
            if self._over.wait(PERIOD):
                return
            # If this process itself was stopped, it could not hear the others.
            pause = time.monotonic() - before - PERIOD
            if pause > self.silence / 2:
                self._heard = min(self._heard + pause, time.monotonic())
                for record in self._records.values() if once == self._judge else ():
                    record.heard += pause
                    record.moved += pause
            try:
                once()
            except jax.errors.JaxRuntimeError:
                continue  # the service does not answer: `_guard` counts the seconds

    def _next_beat(self) -> Beat:
        self._number += 1
        return dataclasses.replace(self._beat, number=self._number)

    def _judge(self) -> None:
        """In process 0, reads all beats and publishes a verdict."""
        now = time.monotonic()
        self._records[0].update(self._next_beat(), now)
        for name, text in self._store.all_in("beats").items():
            self._records[int(name)].update(Beat(**json.loads(text)), now)
        finished = all(r.beat.finished for r in self._records.values())
        end = {}
        if failed := self._store.all_in("failed"):
            end = json.loads(failed[min(failed, key=int)])
        elif why := judge(self._records, now, self.silence):
            end = {"code": 1, "why": why}
        places = format_places(self._records)
        verdict = Verdict(self._number, places, finished, **end)
        self._store.put("verdict", json.dumps(dataclasses.asdict(verdict)))
        self._heard = time.monotonic()
        self._accept(verdict)

    def _listen(self) -> None:
        """In the other processes, sends a beat and reads the verdict."""
        beat = json.dumps(dataclasses.asdict(self._next_beat()))
        self._store.put(f"beats/{self._index}", beat)
        verdict = Verdict(**json.loads(self._store.get("verdict", self.silence)))
        if verdict.number != self.verdict.number:
            self._heard = time.monotonic()
        self._accept(verdict)

    def _accept(self, verdict: Verdict) -> None:
        self.verdict = verdict
        if verdict.code is not None:
            self._over.set()
            if self._index:
                self._store.put(f"ended/{self._index}", "")
            self._end(verdict.code, verdict.why, True)

    def _guard(self) -> None:
        """Ends this process if process 0 is silent; needs no connection."""
        # A line longer than 4 KiB could reach the parent in pieces.
        report(place=self._beat.place, places=self.verdict.places[:2000])
        if time.monotonic() - self._heard <= self.silence + PERIOD:
            return
        self._over.set()
        why = (
            "error: process 0, which coordinates, gave no sign of life for "
            f"{self.silence:g} s (killed, stopped, or cut off); last reported: "
            f"{self.verdict.places}"
        )
        self._end(1, why, False)
