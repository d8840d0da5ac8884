"""Watches over a job: when one of its processes fails, all end, and say which.

Process 0 judges. Every process beats: it leaves its place, "step 12 (data)", on the
board twice a second. Process 0 reads all beats, and leaves its own pulse with a ruling:
go on, or end. The others read that alone, so that a thousand of them cost process 0
little. Whoever cannot read it ends by itself.

All of it runs in threads, for the main thread may be stuck in a collective for ever.
"""

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping

import jax

from jshard.distributed.key_value import Board
from jshard.distributed.patience import UNKNOWN
from jshard.distributed.status import report

PERIOD = 0.5  # seconds between beats
GRACE = 3.0  # seconds at most that process 0 stays on, for the others to read why
SILENCE = 8.0  # seconds without a sign of life
SHOWN = 8  # places


@dataclasses.dataclass(frozen=True)
class Beat:
    """A sign of life.

    Attributes:
      number: of the beat.
      moves: how often the process has changed its place.
      place: where it is, for people.
      patience: the seconds that it may stay there.
      left: whether it is done.
    """

    number: int
    moves: int
    place: str
    patience: float = UNKNOWN
    left: bool = False


@dataclasses.dataclass(frozen=True)
class Ruling:
    """What process 0 tells all.

    Attributes:
      pulse: the number of its beat.
      places: where all are, for people.
      done: whether all have left.
      code: the exit code to end with; None goes on.
      why: why all end.
    """

    pulse: int = 0
    places: str = ""
    done: bool = False
    code: int | None = None
    why: str = ""


@dataclasses.dataclass
class Seen:
    """What was seen of a process.

    Attributes:
      beat: the last one; None before the first.
      heard: when it came.
      moved: when the process changed its place.
    """

    beat: Beat | None
    heard: float
    moved: float

    @property
    def patience(self) -> float:
        """The seconds that it may stay where it is."""
        return self.beat.patience if self.beat else UNKNOWN

    def update(self, beat: Beat, now: float) -> None:
        """Takes a beat, which may be the old one."""
        if self.beat is None or beat.moves != self.beat.moves:
            self.moved = now
        if self.beat is None or beat.number != self.beat.number:
            self.heard = now
        self.beat = beat


def judge(seen: Mapping[int, Seen], now: float, silence: float) -> str | None:
    """Says why a job must end; None where it need not.

    Args:
      seen: by process.
      now: as `time.monotonic()`.
      silence: seconds without a beat that are too many.
    """
    here = {i: s for i, s in seen.items() if not (s.beat and s.beat.left)}
    silent = [i for i, s in here.items() if now - s.heard > silence]
    if silent:
        return (
            f"error: {processes(silent)} gave no sign of life for {silence:g} s "
            f"(killed, stopped, or cut off); the last places: {places(seen)}"
        )
    if here and all(now - s.moved > s.patience for s in here.values()):
        seconds = int(now - max(s.moved for s in here.values()))
        return (
            f"error: {_behind(here)}no process got on for {seconds} s (watch.stuck); "
            f"the places: {places(seen)}; their Python stacks are in their logs"
        )
    return None


def _behind(here: Mapping[int, Seen]) -> str:
    """Names those who have moved least, where others got further: all move alike."""
    moves = {i: s.beat.moves if s.beat else 0 for i, s in here.items()}
    least = min(moves.values())
    if least == max(moves.values()):
        return ""
    last = processes(i for i, count in moves.items() if count == least)
    return f"the others wait for {last}: "


def processes(numbers: Iterable[int]) -> str:
    """Names processes: "process 1", "processes 0-3 and 7"."""
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


def places(seen: Mapping[int, Seen]) -> str:
    """Says where all processes are: "process 1 at step 11 (data), process 0 at ..."."""
    at: dict[str, list[int]] = {}
    for number, s in seen.items():
        at.setdefault(s.beat.place if s.beat else "its start", []).append(number)
    # The fewest first: who is somewhere else is who it is about.
    groups = sorted(at.items(), key=lambda item: len(item[1]))
    texts = [f"{processes(numbers)} at {place}" for place, numbers in groups]
    more = [f"{len(texts) - SHOWN} other places"] if len(texts) > SHOWN else []
    return ", ".join(texts[:SHOWN] + more)


class Watch:
    """The threads that beat, judge and guard in one process.

    Attributes:
      silence: seconds without a sign of life that are too many.
      ruling: the last one heard.
    """

    def __init__(
        self,
        board: Board,
        index: int,
        count: int,
        end: Callable[[int, str, bool], None],
    ):
        """Starts to watch.

        Args:
          board: for the notes.
          index: of this process.
          count: of all.
          end: ends this process, with an exit code, a reason, and whether process 0
            knows it; called in a thread.
        """
        now = time.monotonic()
        self.silence = SILENCE
        self.ruling = Ruling()
        self._board, self._index, self._end = board, index, end
        self._beat = Beat(0, 0, "the start")
        self._seen = {i: Seen(None, now, now) for i in range(count)}
        self._heard = now  # when process 0 gave its last sign of life
        self._over = threading.Event()
        self._lock = threading.Lock()
        for once in (self._judge if index == 0 else self._listen, self._guard):
            name = f"jshard{once.__name__}"
            run = threading.Thread(
                target=self._run, args=[once], name=name, daemon=True
            )
            run.start()

    def at(self, place: str, patience: float = UNKNOWN, *, left: bool = False) -> None:
        """Says where this process is, and how many seconds it may stay there."""
        with self._lock:
            beat = self._beat
            self._beat = Beat(beat.number, beat.moves + 1, place, patience, left)

    def fail(self, code: int, why: str) -> None:
        """Asks process 0 to end the job."""
        note = json.dumps({"code": code, "why": why})
        self._board.put(f"failed/{self._index}", note)

    def wait_until_done(self) -> None:
        """Returns when all processes have left."""
        while not self.ruling.done:
            time.sleep(PERIOD / 10)

    def wait_for_others(self) -> None:
        """In process 0: returns when all that live have read that the job ends."""
        deadline = time.monotonic() + GRACE
        quick = time.monotonic() - self.silence / 2
        living = {i for i, s in self._seen.items() if i and s.heard > quick}
        while time.monotonic() < deadline:
            if living <= {int(name) for name in self._board.all_in("ended")}:
                return
            time.sleep(PERIOD / 10)

    def stop(self) -> None:
        """Ends the threads."""
        self._over.set()

    def _run(self, once: Callable[[], None]) -> None:
        while True:
            before = time.monotonic()
            if self._over.wait(PERIOD):
                return
            # A process that was stopped itself, and goes on, heard nobody meanwhile.
            pause = time.monotonic() - before - PERIOD
            if pause > self.silence / 2:
                self._excuse(pause, everyone=once == self._judge)
            try:
                once()
            except jax.errors.JaxRuntimeError:
                continue  # the service does not answer: `_guard` counts the seconds

    def _excuse(self, pause: float, *, everyone: bool) -> None:
        self._heard = min(self._heard + pause, time.monotonic())
        for seen in self._seen.values() if everyone else ():
            seen.heard += pause
            seen.moved += pause

    def _put_beat(self) -> Beat:
        with self._lock:
            number = self._beat.number + 1
            self._beat = dataclasses.replace(self._beat, number=number)
            beat = self._beat
        return beat

    def _judge(self) -> None:
        """In process 0: reads all beats, and rules."""
        now = time.monotonic()
        beat = self._put_beat()
        self._seen[0].update(beat, now)
        for name, text in self._board.all_in("beats").items():
            self._seen[int(name)].update(Beat(**json.loads(text)), now)
        where = places(self._seen)
        done = all(s.beat and s.beat.left for s in self._seen.values())
        ruling = Ruling(beat.number, where, done)
        failed = self._board.all_in("failed")
        why = judge(self._seen, now, self.silence)
        if failed:
            first = min(failed, key=int)
            ruling = dataclasses.replace(ruling, **json.loads(failed[first]))
        elif why:
            ruling = dataclasses.replace(ruling, code=1, why=why)
        self._board.put("ruling", json.dumps(dataclasses.asdict(ruling)))
        self._heard = time.monotonic()
        self._take(ruling)

    def _listen(self) -> None:
        """In the others: beats, and reads the ruling."""
        beat = self._put_beat()
        note = json.dumps(dataclasses.asdict(beat))
        self._board.put(f"beats/{self._index}", note)
        ruling = Ruling(**json.loads(self._board.get("ruling", self.silence)))
        if ruling.pulse != self.ruling.pulse:
            self._heard = time.monotonic()
        self._take(ruling)

    def _take(self, ruling: Ruling) -> None:
        self.ruling = ruling
        if ruling.code is not None:
            self._over.set()
            if self._index:
                self._board.put(f"ended/{self._index}", "")
            self._end(ruling.code, ruling.why, True)

    def _guard(self) -> None:
        """Ends this process when process 0 is silent; talks to its parent alone."""
        # A line longer than a pipe takes at once (4 KiB) would arrive in pieces.
        report(place=self._beat.place, places=self.ruling.places[:2000])
        if time.monotonic() - self._heard <= self.silence + PERIOD:
            return
        self._over.set()
        why = (
            "error: process 0, which coordinates, gave no sign of life for "
            f"{self.silence:g} s (killed, stopped, or cut off); the last places: "
            f"{self.ruling.places}"
        )
        self._end(1, why, False)
