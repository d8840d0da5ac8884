"""A report of a long run: exact where it can be, in memory that does not grow."""

import json

from jshard.training.report.run_report import write_report
from jshard.training.report.series import Series


def test_a_series_of_many_values_keeps_few_and_their_means_total_and_last():
    series = Series()
    for step in range(1, 100_001):
        series.add(step, step % 10)
    assert len(series.means) == len(series.samples) <= 2048
    assert (series.count, series.total, series.group) == (100_000, 450_000, 64)
    assert series.samples[-1] == (100_000, 0)
    assert all(abs(mean - 4.5) < 0.6 for _, mean in series.means)
    values = Series()
    for step in range(1, 2049):
        values.add(step, step)
    assert values.samples == values.means == [(n, n) for n in range(1, 2049)]
    values.add(2049, 2049)
    assert values.means[:1] == [(2, 1.5)]
    assert values.means[-1] == (2049, 2049)


def test_values_as_large_as_there_are_have_a_mean():
    series = Series()
    for step in range(5000):
        series.add(step, 1.7e308 if step % 2 else -1.7e308)
    assert all(abs(mean) < 1e308 for _, mean in series.means[:-1])


def test_a_report_of_more_steps_than_it_keeps_has_the_runs_numbers(tmp_path):
    count = 5000
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, count + 1):
            line = {"step": step, "loss": 5.0, "step_time": 0.25, "data_wait": 0.05}
            if step % 500 == 7:
                line["tokens_per_second"] = 1.0  # stalls
            else:
                line["tokens_per_second"] = 2000.0 + step % 3
            if step % 10 == 0:
                line |= {"checkpoint_bytes": 5e6, "checkpoint_blocked": 0.5}
            file.write(json.dumps(line) + "\n")
        file.write("{\n" * 1000)
    write_report(tmp_path)
    page = (tmp_path / "report.html").read_text()
    for text in (
        "training loss at step 5000",
        "<b>2k</b>",
        "20.0%",
        "Left out: 1000 of what the files hold",
        "metrics.jsonl, line 5001: it has no metrics of a step",
    ):
        assert text in page, text
