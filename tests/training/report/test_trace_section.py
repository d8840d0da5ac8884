"""A run's report shows what a trace of it showed beside its plan."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_damaged_runs import WRONG
from test_report import EVIL, Page

from jshard.training.report.run_report import write_report
from jshard.training.report.trace_section import PAGE, PLAN

PROFILE = {
    "planned": 0.0212,
    "measured": 0.025,
    "first": 1,
    "causes": {
        "started late": 1e-4,
        "kernel slower": 2e-3,
        "extra": 3e-5,
        "missing": 0,
    },
    "deviations": [{"words": "a later one"}, {"words": f"In step 4 {EVIL} took long."}],
}


@pytest.fixture
def run(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "profile").mkdir()
    return tmp_path


def page_of(run, profile) -> Page:
    (run / PLAN).write_text(json.dumps({"schema": 2, "profile": profile}))
    write_report(run)
    return Page((run / "report.html").read_text())


def test_the_report_has_times_the_first_deviation_and_three_causes(run):
    page = page_of(run, PROFILE)
    assert "Trace beside the plan" in page.text["h2"]
    rows = dict(zip(page.text["th"], page.text["td"], strict=False))
    assert rows["measured"] == "25.00 ms per step"
    assert rows["planned"] == "21.20 ms per step"
    assert rows["first"] == f"In step 4 {EVIL} took long."
    assert rows["kernel slower"] == "2.00 ms per step and device"
    assert list(rows)[3:6] == ["kernel slower", "started late", "extra"]
    assert "missing" not in rows
    assert PAGE not in (run / "report.html").read_text()


def test_the_page_with_the_timelines_is_linked_if_it_is_there(run):
    (run / PAGE).touch()
    page_of(run, PROFILE)
    assert f'<a href="{PAGE}">The timeline</a>' in (run / "report.html").read_text()


def test_on_cpus_nothing_is_planned_and_without_a_trace_there_is_no_section(run):
    page = page_of(run, PROFILE | {"planned": None, "first": None})
    assert "planned" not in page.text["th"]
    assert "Trace beside the plan" not in page_of(run, None).text.get("h2", [])


@given(data=st.data())
def test_a_damaged_comparison_is_left_out_and_said(data, tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    (run / "profile").mkdir()
    wrong = PROFILE | {data.draw(st.sampled_from(sorted(PROFILE))): data.draw(WRONG)}
    page = page_of(run, wrong)
    assert not any(text.startswith("alert") for text in page.text.get("script", []))
    (run / PLAN).write_text("[")
    write_report(run)
    assert "Left out: 1 of what the files hold" in (run / "report.html").read_text()
