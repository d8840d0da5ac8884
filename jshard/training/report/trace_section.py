"""What a trace of a run showed beside its plan, in the run's report."""

from html import escape
from pathlib import Path

from jshard.system.formatting import format_seconds
from jshard.system.pages.page import note, section, table
from jshard.training.report.run_files import read_object

PLAN, PAGE = "profile/plan.json", "profile/plan.html"  # in a run's folder
_CAUSES = 3  # that are shown


def trace_section(workdir: Path) -> str:
    """Returns the times planned and measured, and what deviated; "" without a plan.

    ``python -m jshard.plan --profile=RUN --json=RUN/profile/plan.json`` writes it.
    """
    found, damage = read_object(workdir / PLAN)
    if damage:
        raise ValueError(damage[0])
    profile = found.get("profile")
    if profile is None:
        return ""
    planned, first = profile["planned"], profile["first"]
    rows = [("measured", f"{format_seconds(profile['measured'])} per step")]
    if planned is not None:
        rows.append(("planned", f"{format_seconds(planned)} per step"))
    if first is not None:
        rows.append(("first", profile["deviations"][first]["words"]))
    causes = sorted(profile["causes"].items(), key=lambda cause: -cause[1])
    rows += [
        (cause, f"{format_seconds(seconds)} per step and device")
        for cause, seconds in causes[:_CAUSES]
    ]
    whole = note(f"Everything that deviated is in {PLAN}.")
    if (workdir / PAGE).is_file():
        whole = f'<p class="note"><a href="{escape(PAGE)}">The timeline</a></p>'
    return section("Trace beside the plan", table(rows) + whole)
