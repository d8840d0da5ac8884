"""The live line in a terminal, and plain lines elsewhere."""

import contextlib
import os
import re
import sys

import pytest

from jshard.training.run.progress import ProgressDisplay


def test_without_a_terminal_each_log_is_one_plain_line(capsys):
    with ProgressDisplay(20) as display:
        display.references = {"bigram model": 2.2}
        display.say("8 devices")
        display.after_step(1, {})
        display.log(1, {"loss": 5.5, "time_to_first_step": 8.25})
        display.log(10, {"loss": 2.5, "step_time": 6.1, "tokens_per_second": 51234.0})
        display.evaluated(10, {"eval_loss": 2.0})
        display.log(20, {"loss": 1.5})
    assert capsys.readouterr().out.splitlines() == [
        "8 devices",
        "step 1/20  loss 5.5000  after 8.2 s",
        "step 10/20  loss 2.5000  51.2k tokens/s  1:01 left",
        "step 10/20  eval_loss 2.0000  bigram model 2.2000",
        "step 20/20  loss 1.5000  51.2k tokens/s  0:00 left  eval 2.0000",
    ]


@pytest.fixture
def terminal(monkeypatch):
    """Makes standard output a terminal of so many columns; returns what it was sent."""

    @contextlib.contextmanager
    def opened(columns: int = 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "xterm")
        primary, secondary = os.openpty()
        shown = []
        with os.fdopen(secondary, "w") as file:
            monkeypatch.setattr(sys, "stdout", file)
            yield shown
            monkeypatch.undo()
        with contextlib.suppress(OSError):  # that is how a closed terminal ends
            while data := os.read(primary, 1 << 16):
                shown.append(data)
        os.close(primary)
        shown[:] = [b"".join(shown).decode()]

    return opened


def states(shown: str) -> list[str]:
    """The states of the live line, without colours."""
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown)
    return [line for line in re.split(r"[\r\n]+", plain) if line.startswith("step ")]


class Metric:
    """A metric on a device, there or still to come."""

    def __init__(self, value: float, *, ready: bool = True):
        self.value, self.ready = value, ready

    def is_ready(self) -> bool:
        return self.ready

    def __float__(self) -> float:
        assert self.ready, "the display waits for a device"
        return self.value


def test_in_a_terminal_the_last_state_of_the_live_line_stays(terminal):
    with terminal() as shown, ProgressDisplay(20) as display:
        values = {"loss": 2.5, "step_time": 6.1, "tokens_per_second": 51234.0}
        display.log(19, values)
        display.evaluated(19, {"eval_loss": 2.0})
        display.log(20, {"loss": 1.5, "step_time": 6.1})
        display.evaluated(20, {"eval_loss": 1.25})
    (text,) = shown
    assert "step 19/20  eval_loss 2.0000" in text
    assert text.endswith("\n")
    assert "\x1b[?25l" not in text  # a killed process would leave the cursor hidden
    last = states(text)[-1]
    assert last.startswith("step 20/20")
    for part in ("loss 1.5000", "51.2k tokens/s", "0:00 left", "eval 1.2500"):
        assert part in last


def test_the_live_line_has_the_newest_step_whose_loss_is_there(terminal):
    with terminal() as shown, ProgressDisplay(20) as display:
        display.log(1, {"loss": 5.5, "step_time": 60.0})
        display.after_step(2, {"loss": Metric(4.5), "accuracy": Metric(0.25)})
        display.after_step(3, {"loss": (late := Metric(3.5, ready=False))})
        display.say("here")
        late.ready = True
    here, *_, last = states(shown[0].split("here")[1])
    assert here.endswith("loss 4.5000  accuracy 0.250  18:00 left")
    assert here.startswith("step 2/20")
    assert re.match(r"step 3/20 [━╸╺]+ loss 3.5000  17:00 left", last)


def test_before_the_first_step_it_shows_what_is_waited_for(terminal, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("jshard.training.run.progress.time.monotonic", lambda: clock[0])
    waited = {"joining": 0.1, "imports": 2.5}
    with terminal() as shown, ProgressDisplay(20, waited=waited) as display:
        for phase, seconds in (("reading the first batch", 4), ("compiling", 33)):
            display.at(phase, 0)
            clock[0] += seconds
            display.say("...")
        display.log(1, {"loss": 5.5, "time_to_first_step": 40.0})
        display.at("computing", 2)
        clock[0] += 1
        display.say("...")
        clock[0] += 1  # it is long by now
    found = "\n".join(states(shown[0]))
    assert re.search("step 0/20 .* reading the first batch 4 s", found)
    assert re.search("step 0/20 .* compiling 33 s", found)
    assert (
        "step 1/20  after 40.0 s (imports 2.5, reading the first batch 4.0, "
        "compiling 33.0)" in found
    )
    assert "computing 1 s" not in found


@pytest.mark.parametrize("columns", [14, 30, 44, 70])
def test_the_live_line_fits_a_narrow_terminal(terminal, columns):
    with terminal(columns) as shown, ProgressDisplay(20) as display:
        display.at("reading the first evaluation batch", 0)
        display.log(1, {"loss": 5.5, "step_time": 60.0, "tokens_per_second": 51234.0})
        display.after_step(2, {"loss": Metric(4.5)})
    assert max(map(len, states(shown[0]))) < columns
    last = states(shown[0])[-1]
    assert last.startswith("step 2/20")
    assert columns < 30 or "loss 4.5000" in last


def test_a_run_that_ends_before_its_first_step_leaves_no_line(terminal):
    with (
        terminal() as shown,
        contextlib.suppress(KeyboardInterrupt),
        ProgressDisplay(20) as display,
    ):
        display.at("compiling", 1)
        raise KeyboardInterrupt
    assert shown[0].rindex("\x1b[2K") > shown[0].rindex("compiling")  # erased


def test_a_forced_colour_is_no_reason_to_redraw_lines_in_a_pipe(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with ProgressDisplay(20) as display:
        display.log(20, {"loss": 1.5})
    assert capsys.readouterr().out == "step 20/20  loss 1.5000\n"


def test_a_process_that_is_not_the_first_shows_nothing(capsys):
    with ProgressDisplay(20, enabled=False) as display:
        display.say("8 devices")
        display.log(10, {"loss": 2.5})
        display.evaluated(10, {"eval_loss": 2.0})
    assert capsys.readouterr().out == ""
