"""The report: complete, escaped, well-formed, and drawn within its charts."""

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jshard.system.errors import UserError
from jshard.system.pages.charts import line_chart, ticks
from jshard.system.pages.page import cards
from jshard.training.report.run_files import read_metrics
from jshard.training.report.run_report import write_report

VOID = {"meta", "br", "link", "img", "input", "hr"}
GENERATED = [
    {
        "step": step,
        "eval_loss": None if step == 900 else 1 / step,
        "text": f"text {step}",
    }
    for step in range(100, 1000, 100)
]
EVIL = "</script></pre><script>alert('&amp;')</script><img src=x onerror=\"a()\">"


class Page(HTMLParser):
    """Checks that elements nest, and collects them with their text."""

    def __init__(self, html: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text: dict[str, list[str]] = {}
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.text.setdefault(self.open[-1], []).append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


def write_run(path, lines=(), notes=None, config=None) -> Page:
    path.mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (path / "metrics.jsonl").write_text(text)
    (path / "notes.json").write_text(json.dumps(notes or {}))
    (path / "config.json").write_text(json.dumps(config or {}))
    write_report(path)
    return Page((path / "report.html").read_text(encoding="utf-8"))


LINES = [
    {"step": 1, "loss": 5.5, "grad_norm": 2.0, "time_to_first_step": 8.25},
    {"step": 10, "loss": 2.5, "grad_norm": 1.0, "tokens_per_second": 50e3, "mfu": 0.4},
    {"step": 10, "eval_loss": 2.25},
    {"step": 20, "loss": 1.5, "grad_norm": None, "tokens_per_second": 52e3},
    {"step": 20, "eval_loss": 2.0},
]


def sample(text):
    return {"step": 1, "eval_loss": None, "text": text}


def figures(page: Page) -> dict[str, str]:
    lines = ("training", "validation")
    names = [text for text in page.text["span"] if text not in lines]
    return dict(zip(names, page.text["b"], strict=True))


def test_samples_are_shown_as_training_went_on(tmp_path):
    page = write_run(tmp_path, LINES, {"generated": GENERATED})
    assert page.text["h3"] == [
        "step 100, validation loss 0.0100",
        "step 300, validation loss 0.0033",
        "step 400, validation loss 0.0025",
        "step 600, validation loss 0.0017",
        "step 700, validation loss 0.0014",
        "step 900",
    ]
    assert [t for t in page.text["pre"] if t.startswith("text")][-1] == "text 900"
    one = write_run(
        tmp_path / "one", LINES, {"generated": [{**GENERATED[0], "text": EVIL}]}
    )
    assert one.text["pre"] == [EVIL]


def test_the_final_numbers_stand_beside_the_references(tmp_path):
    page = write_run(tmp_path, LINES, {"references": {"bigram model": 2.2134}})
    results = figures(page)
    assert results == {
        "validation loss at step 20": "2.0000",
        "bigram model; validation is 0.2134 below": "2.2134",
        "training loss at step 20": "1.5000",
        "time to first step": "8.2 s",
        "tokens per second, median": "51k",
        "MFU, median": "40.0%",
    }


def test_each_metric_has_a_chart_and_the_loss_has_both_curves(tmp_path):
    page = write_run(tmp_path, LINES, {"references": {"bigram model": 2.2134}})
    titles = page.text["figcaption"]
    assert titles == ["Loss", "Gradient norm", "Tokens per second", "MFU"]
    data = [json.loads(text) for text in page.text["script"][:-1]]
    assert data[0]["lines"] == {
        "training": [[1, 5.5], [10, 2.5], [20, 1.5]],
        "validation": [[10, 2.25], [20, 2.0]],
    }
    assert data[1]["lines"] == data[0]["lines"]  # drawn again, for phones
    assert data[2]["lines"] == {"training": [[1, 2.0], [10, 1.0]]}
    assert "bigram model 2.213" in page.text["text"]


def test_notes_and_config_are_shown(tmp_path):
    page = write_run(
        tmp_path,
        notes={"start_up": "8 devices\nmesh 1 x 8"},
        config={"steps": 3, "optimizer": {"betas": [0.9, 0.95]}},
    )
    assert page.text["pre"] == ["8 devices\nmesh 1 x 8"]
    assert page.text["th"] == ["steps", "optimizer.betas"]
    assert page.text["td"] == ["3", "[0.9, 0.95]"]


def test_the_keys_that_differ_from_the_recipes_stand_before_all_of_them(tmp_path):
    page = write_run(
        tmp_path,
        notes={"changed": ["optimizer.betas"]},
        config={"steps": 3, "optimizer": {"betas": [0.9, 0.95]}},
    )
    assert page.text["th"] == ["optimizer.betas", "steps", "optimizer.betas"]
    assert page.text["summary"] == ["All 2 keys"]


def test_the_loss_comes_first_drawn_for_wide_screens_and_for_phones(tmp_path):
    page = write_run(tmp_path, LINES)
    tags = [tag for tag, _ in page.elements]
    assert tags.index("figure") < tags.index("b")
    drawings = [x["class"] for tag, x in page.elements if tag == "svg"]
    assert drawings == ["large", "small", "small", "small", "small"]


@pytest.mark.parametrize("count", range(2, 20))
def test_no_card_is_alone_in_its_row(count):
    page = Page(cards(["<p></p>"] * count))
    widths = [x["class"] for tag, x in page.elements if tag == "div"][1:]
    thirds = widths.count("third")
    assert widths == ["third"] * thirds + ["half"] * (count - thirds)
    assert thirds % 3 == 0
    assert (count - thirds) % 2 == 0


def test_a_run_of_a_programs_own_functions_has_the_name_of_its_folder(tmp_path):
    page = write_run(tmp_path / "try 3", LINES, {"recipe": "recipe"})
    assert page.text["h1"] == ["try 3"]
    page = write_run(tmp_path / "try 4", LINES, {"recipe": "/me/llama.py:3-8b"})
    assert page.text["h1"] == ["llama:3-8b"]


def test_checkpoints_are_a_tile_and_a_table_and_no_curves(tmp_path):
    lines = [
        {"step": 10, "loss": 2.0, "step_time": 0.1},
        {"step": 20, "loss": 1.5, "step_time": 0.2},
        {"step": 20, "loss": 1.25, "step_time": 0.1},
        {"step": 10, "checkpoint_blocked": 0.0123, "checkpoint_bytes": 2**20},
        {"step": 10, "checkpoint_write_time": 1.25},
        {"step": 20, "checkpoint_blocked": 0.02, "checkpoint_write_time": 0.5},
        {"step": 15, "checkpoint_blocked": 0.01, "checkpoint_write_time": None},
    ]
    page = write_run(tmp_path, lines)
    results = figures(page)
    held_up = "held up training for a save, median"
    assert results[f"{held_up}; 12.3% of a step's time"] == "12.3 ms"
    headings = ["step", "size", "held up training", "written in"]
    assert page.text["th"][-7:] == [*headings, "10", "15", "20"]
    cells = ["1.0 MiB", "12.3 ms", "1.2 s", "10.0 ms", "20.0 ms", "500 ms"]
    assert page.text["td"][-6:] == cells
    assert page.text["figcaption"] == ["Loss", "Steps by their time"]
    assert "Checkpoints" in page.text["h2"]
    longer = [*lines, *({"step": 30, "checkpoint_blocked": 0.27} for _ in range(4))]
    results = figures(write_run(tmp_path / "longer", longer))
    assert results[f"{held_up}; as long as 2.7 steps"] == "270 ms"


@pytest.mark.parametrize(
    ("steps", "said"), [([500], "step 500"), ([0, 500], "steps 0, 500")]
)
def test_the_steps_at_which_a_run_was_resumed_stand_in_the_header(
    steps, said, tmp_path
):
    page = write_run(tmp_path, LINES, {"resumed": steps})
    assert page.text["p"] == [f"{tmp_path} · resumed at {said}"]
    assert "Checkpoints" not in page.text["h2"]


def test_nothing_from_outside_becomes_markup(tmp_path):
    lines = [
        {"step": step, "loss": 1.0, EVIL: 1.0, f"eval_{EVIL}": 2.0} for step in (1, 2)
    ]
    evil = write_run(
        tmp_path / EVIL.replace("/", ""),
        lines,
        {
            "references": {EVIL: 2.0},
            "start_up": EVIL,
            "generated": [sample(EVIL)],
            "recipe": EVIL,
        },
        {EVIL: EVIL, "group": {EVIL: EVIL}},
    )
    harmless = re.sub(r"\W", "x", EVIL)
    plain = write_run(
        tmp_path / "run",
        [{k.replace(EVIL, harmless): v for k, v in line.items()} for line in lines],
        {
            "references": {"x": 2.0},
            "start_up": "x",
            "generated": [sample("x")],
            "recipe": "x",
        },
        {"x": "x", "group": {"x": "x"}},
    )
    assert [tag for tag, _ in evil.elements] == [tag for tag, _ in plain.elements]
    assert evil.text["pre"] == [EVIL, EVIL]
    assert evil.text["td"] == [EVIL, EVIL]


def test_the_page_asks_the_network_for_nothing(tmp_path):
    page = write_run(tmp_path, LINES)
    for tag, attributes in page.elements:
        assert tag not in ("link", "iframe", "object")
        assert not {"src", "href", "srcset", "data"} & attributes.keys()
    assert not re.search(r"url\(|@import|fetch\(|https?:", "".join(page.text["style"]))
    assert "http" not in page.text["script"][-1]


def test_a_run_without_metrics_has_a_report_without_charts(tmp_path):
    write_report(tmp_path)
    assert Page((tmp_path / "report.html").read_text()).count("svg") == 0


def test_a_last_line_that_was_cut_short_is_left_out(tmp_path):
    text = '{"step": 1, "loss": 2.0}\n{"step": 2, "lo'
    (tmp_path / "metrics.jsonl").write_text(text)
    assert list(read_metrics(tmp_path)) == [{"step": 1, "loss": 2.0}]


@pytest.mark.parametrize(
    "line", ["{", "[1]", "3", '{"loss": 1}', '{"step": "4"}', "", "\ufffd\0"]
)
def test_a_line_that_is_none_of_metrics_is_an_error_that_names_it(line, tmp_path):
    text = f'{{"step": 1}}\n{{"step": 2}}\n{line}\n{{"step": 4}}\n'
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 3, is not a line"):
        list(read_metrics(tmp_path))


def test_a_long_runs_curve_is_thinned_and_keeps_its_last_step():
    points = [(step, 1.0) for step in range(1, 100_001)]
    page = Page(line_chart("Loss", {"training": points}, wide=True))
    (line,) = json.loads(page.text["script"][0])["lines"].values()
    assert len(line) <= 600
    assert line[-1] == [100_000, 1.0]


def chart_of(page: Page, number: int) -> dict[str, Any]:
    return json.loads(page.text["script"][number])


@pytest.mark.parametrize("name", ["tokens_per_second", "mfu"])
def test_the_chart_of_a_rate_leaves_out_what_is_no_rate_of_training(name, tmp_path):
    rates = [22e3 + 100 * (step % 7) for step in range(1, 101)]
    rates[9::10] = [479e3] * 10  # by a clock that ran on while steps were read
    rates[50] = 20.0
    page = write_run(
        tmp_path, [{"step": n, name: rate} for n, rate in enumerate(rates, 1)]
    )
    low, high = chart_of(page, 0)["y"][:2]
    assert 20e3 < low <= 22e3 < 22.6e3 <= high < 24e3
    (line,) = chart_of(page, 0)["lines"].values()
    assert len(line) == 89
    title = "MFU" if name == "mfu" else "Tokens per second"
    said = f"{title} (11 of 100 steps are outliers, not drawn)"
    assert said in page.text["figcaption"]


def test_the_chart_of_a_rate_that_changes_has_all_of_it(tmp_path):
    rates = [20e3] * 50 + [9e3] * 50
    page = write_run(
        tmp_path,
        [{"step": n, "tokens_per_second": rate} for n, rate in enumerate(rates, 1)],
    )
    (line,) = chart_of(page, 0)["lines"].values()
    assert len(line) == 100
    assert "Tokens per second" in page.text["figcaption"]


values = st.floats(-(2.0**127), 2.0**127, width=32)


@given(values, values, st.integers(2, 12))
def test_ticks_are_evenly_spaced_and_enclose_the_values(a, b, count):
    low, high = sorted([a, b])
    marks = ticks(low, high, count)
    slack = 1e-6 * (marks[1] - marks[0])
    assert marks[0] - slack <= low
    assert high <= marks[-1] + slack
    assert 2 <= len(marks) <= count + 3


@given(st.lists(values, min_size=1, max_size=20), st.lists(values, max_size=2))
def test_every_line_is_drawn_within_its_chart(losses, references):
    chart = line_chart(
        "Loss",
        {"training": list(enumerate(losses))},
        references={f"reference {i}": value for i, value in enumerate(references)},
    )
    page = Page(chart)
    _, _, width, height = map(float, dict(page.elements)["svg"]["viewbox"].split())
    paths = [a["d"] for tag, a in page.elements if tag == "path"]
    (line,) = [d for d in paths if " " in d and "H" not in d]
    points = [tuple(map(float, pair.split())) for pair in line[1:].split("L")]
    assert len(points) == len(losses)
    for x, y in points:
        assert 0 <= x <= width
        assert 0 <= y <= height


@pytest.mark.parametrize("value", [0.0, 2.5, -1e-30, 3e38])
def test_a_constant_value_is_a_line_through_the_middle(value):
    page = Page(line_chart("Rate", {"training": [(1, value), (2, value)]}))
    low, high = json.loads(page.text["script"][0])["y"][:2]
    assert low < value < high


def test_pictures_stand_with_their_captions(tmp_path):
    notes = {"pictures": [{"png": "iVBORw0KGgo=", "caption": "3, not <8>"}]}
    page = write_run(tmp_path, LINES, notes)
    assert "Predictions" in page.text["h2"]
    assert page.text["figcaption"][-1] == "3, not <8>"
    text = (tmp_path / "report.html").read_text()
    assert 'src="data:image/png;base64,iVBORw0KGgo="' in text
