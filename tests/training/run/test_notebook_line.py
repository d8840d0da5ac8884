"""The line of a run in a notebook: one output, which is updated in place."""

import builtins
import sys
import types

import pytest

from jshard.system.errors import Interrupted, Preempted, UserError
from jshard.training.report.shown_report import ShownReport
from jshard.training.run.progress import ProgressDisplay


@pytest.fixture
def outputs(monkeypatch):
    """Makes this process a notebook's kernel; returns the states of its outputs."""
    outputs = []

    class Handle:
        def __init__(self, bundle):
            outputs.append([bundle])

        def update(self, bundle, raw):
            assert raw
            outputs[-1].append(bundle)

    def display(bundle, raw, display_id):
        assert raw
        assert display_id
        return Handle(bundle)

    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    module = types.ModuleType("IPython.display")
    module.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return outputs


def test_a_notebook_has_one_line_however_many_steps_are_logged(outputs, capsys):
    with ProgressDisplay(60) as display:
        display.say("8 devices")
        display.at("compiling", 0)
        display.log(1, {"loss": 5.5, "time_to_first_step": 8.25})
        for step in range(2, 61):
            display.log(step, {"loss": 1.5, "step_time": 6.1})
        display.evaluated(60, {"eval_loss": 2.0})
    assert len(outputs) == 1
    text = outputs[0][-1]["text/plain"]
    assert text == "step 60/60  loss 1.5000  0:00 left  eval 2.0000"
    assert '<progress value="60" max="60">' in outputs[0][-1]["text/html"]
    assert "step 0/60  compiling 0 s" in [x["text/plain"] for x in outputs[0]]
    assert capsys.readouterr().out.splitlines() == [
        "8 devices",
        "step 1/60  after 8.2 s",
        "step 60/60  eval_loss 2.0000",
    ]


def test_what_the_line_says_is_no_markup(outputs):
    with ProgressDisplay(2) as display:
        display.log(1, {"loss": 1.0, "<b>_per_second": 2.0})
    assert "&lt;b&gt;/s" in outputs[0][-1]["text/html"]


def test_nothing_is_left_of_a_line_before_the_first_step(outputs):
    with ProgressDisplay(60) as display:
        display.at("reading the first batch", 0)
    assert outputs[0][-1] == {"text/plain": "", "text/html": ""}


def test_a_process_that_is_not_the_first_has_no_line(outputs):
    with ProgressDisplay(2, enabled=False) as display:
        display.log(1, {"loss": 1.0})
    assert outputs == []


def test_the_end_by_a_signal_is_one_line_in_a_notebook():
    for kind in (Preempted, Interrupted):
        shown = kind("interrupted by SIGINT at step 5: saved")._render_traceback_()
        assert shown == ["interrupted by SIGINT at step 5: saved"]


def test_a_report_is_a_frame_of_its_own_or_a_line_says_there_is_none(tmp_path):
    with pytest.raises(UserError, match="has no report yet: fit"):
        ShownReport(tmp_path)
    (tmp_path / "report.html").write_text('<p class="a">')
    shown = ShownReport(tmp_path)
    assert repr(shown) == f"report: {tmp_path}/report.html"
    assert "&lt;p class=&quot;a&quot;&gt;" in shown._repr_html_()
