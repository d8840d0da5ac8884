"""A report of damaged or hostile files leaves them out, says so, and ends no run."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from test_report import EVIL, Page

from jshard.training.report.run_report import write_report

NOTES = {
    "recipe": EVIL,
    "resumed": [EVIL],
    "stopped": {"step": EVIL, "why": EVIL},
    "references": {EVIL: 1.0},
    "generated": [{"step": EVIL, "eval_loss": None, "text": EVIL}],
    "samples": {EVIL: {"step": EVIL, "text": EVIL}},
    "pictures": [{"png": EVIL, "caption": EVIL}],
    "start_up": EVIL,
    "changed": [EVIL],
}
WRONG = st.sampled_from(
    [
        None,
        True,
        -1,
        2**80,
        10**400,
        1e308,
        "x",
        "\ud800",
        [],
        {},
        [1],
        {"a": 1},
        [[[]]],
    ]
)


@given(data=st.data())
def test_what_is_damaged_is_left_out_said_and_never_run(data, tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    files: dict[str, Any] = {"config": {"a": {"b": 1}}, "notes": dict(NOTES)}
    line: dict[str, Any] = {"step": 1, "loss": 1.0, "mfu": 0.5, "checkpoint_bytes": 5}
    kind = data.draw(st.sampled_from(["config", "notes", "metrics"]))
    if kind == "config":
        files["config"] = data.draw(WRONG)
    elif kind == "notes":
        files["notes"][data.draw(st.sampled_from(sorted(NOTES)))] = data.draw(WRONG)
    else:
        line[data.draw(st.sampled_from([*sorted(line), EVIL]))] = data.draw(WRONG)
    for name, value in files.items():
        (run / f"{name}.json").write_text(json.dumps(value))
    lines = [json.dumps(x) for x in (line, {"step": 2, "loss": 1.0, EVIL: 3.0})]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    write_report(run)
    page = Page((run / "report.html").read_text())
    assert not any(text.startswith("alert") for text in page.text.get("script", []))
    assert not any("onerror" in attributes for _, attributes in page.elements)


def test_a_report_says_what_it_left_out_and_takes_no_file_from_elsewhere(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "secret.png").write_bytes(b"\x89PNG\r\n\x1a\nsecret")
    (run / "link.png").symlink_to(tmp_path / "secret.png")
    for number, name in enumerate(("../secret.png", "link.png", str(run / "link.png"))):
        notes = {"samples": {"drawn": {"step": 1, "picture": name}}}
        (run / "notes.json").write_text(json.dumps(notes))
        (run / "metrics.jsonl").write_text(f'{{"step": 1, "loss": "{number}"}}\nnone\n')
        write_report(run)
        page = (run / "report.html").read_text()
        assert "Left out: 3 of what the files hold" in page
        assert "metrics.jsonl, line 1: &#x27;loss&#x27; is not a number" in page
        assert "metrics.jsonl, line 2: it has no metrics of a step" in page
        assert "c2VjcmV0" not in page
