"""The histogram of step times, and what happened in the longest steps."""

import json

from test_report import Page, write_run


def test_the_longest_steps_say_what_happened_in_them(tmp_path):
    times = {7: 3.0, 20: 2.0, 31: 1.5, 41: 1.2, 50: 1.1}
    lines = [{"step": 1, "loss": 1.0, "time_to_first_step": 60.0}]
    for step in range(2, 61):
        lines.append({"step": step, "loss": 1.0, "step_time": times.get(step, 0.1)})
    lines[6]["data_wait"] = 2.9
    lines[19]["collect_time"] = 1.8
    lines[19]["data_wait"] = 0.01
    lines += [{"step": 30, "eval_loss": 1.0}, {"step": 40, "checkpoint_bytes": 5}]
    page = write_run(tmp_path, lines)
    assert "Step times" in page.text["h2"]
    text = (tmp_path / "report.html").read_text()
    for words in (
        "<th>7</th><td>3.0 s</td><td>waited 2.9 s for data</td>",
        "<th>20</th><td>2.0 s</td><td>collected garbage for 1.8 s</td>",
        "<th>31</th><td>1.5 s</td><td>first after an evaluation</td>",
        "<th>41</th><td>1.2 s</td><td>a checkpoint was being written</td>",
        "<th>50</th><td>1.1 s</td><td>no known cause</td>",
    ):
        assert words in text
    bars = [dict(x) for tag, x in page.elements if tag == "rect"]
    bars = bars[: len(bars) // 2]  # the others are for phones
    assert 10 < len(bars) <= 41
    heights = [float(bar["height"]) for bar in bars]
    assert heights[0] == max(heights)  # most steps took 0.1 s
    assert sum(height > 0 for height in heights) == 6


def test_a_run_without_times_has_no_section(tmp_path):
    page = write_run(tmp_path, [{"step": 1, "loss": 1.0}])
    assert "Step times" not in page.text.get("h2", [])


def test_any_time_can_be_drawn(tmp_path):
    values = (1e-300, 1e300, None, -1.0, 0.0, 5)
    lines = [{"step": i, "step_time": x} for i, x in enumerate(values)]
    page = write_run(tmp_path, lines)
    assert page.count("rect") <= 2 * 41  # one for phones
    assert json.dumps("NaN") not in (tmp_path / "report.html").read_text()
    assert isinstance(page, Page)
