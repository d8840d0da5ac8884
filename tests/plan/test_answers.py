"""`--topologies`: which GPUs, how many, how long and how much."""

import dataclasses
import json
import re
from typing import Any

import pytest

import jshard
from jshard.plan import search_command
from jshard.plan.output import answer_page, answer_text
from jshard.plan.search.answers import (
    NO_PRICES,
    Answer,
    Question,
    as_dict,
    compiled_over_estimated,
    front,
    middle_of_each_kind,
    topologies,
    worth_compiling,
)
from jshard.plan.search.candidates import Candidate
from jshard.plan.search.estimates import Estimate
from jshard.plan.search.outcomes import Outcome, Search
from jshard.plan.search.pareto_search import Estimated
from jshard.plan.search.prices import Prices, read_prices
from jshard.plan.topology import parse

PRICES = Prices({"h100": 2.0, "h200": 3.0}, "USD", "a contract, 2026-11-01")
DAY = 86_400


def searched(spec: str, seconds: float = 1.0, **more: Any) -> Search:
    """A search on a topology in which one of three candidates fits and is fastest."""
    _, number = parse(spec)
    speed = (2 if spec.startswith("h200") else 1) * number / (1 + number / 256)
    memory = {"h100": 60, "h200": 120}.get(spec.partition(":")[0], 10) * 2**30

    def outcome(name: str, **figures: Any) -> Outcome:
        given = {"seconds": seconds, "memory": memory, "usable": memory, "mfu": 0.4}
        candidate = Candidate({"policy.remat": name})
        return Outcome(candidate, **given | figures)

    found = [
        outcome("full", rate=8_000 * speed, range=(0.9 * seconds, 1.2 * seconds)),
        outcome("dots", rate=10_000 * speed, range=(0.9 * seconds, 1.2 * seconds)),
        outcome("none", rate=12_000 * speed, memory=memory + 1),
        outcome("names", error="Killed"),
    ]
    return Search(
        spec, "tokens", memory, **{"outcomes": found, "considered": 4, "refused": [],
        "too_large": [], "untried": [], "warnings": []} | more,
    )  # fmt: skip


def answers(question: Question, *specs: str) -> list[Answer]:
    return [question.answer(searched(spec)) for spec in specs]


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("h100:8", ["h100:8"]),
        ("h100:8..64", ["h100:8", "h100:16", "h100:32", "h100:64"]),
        ("h100:48..100,h200:16", ["h100:48", "h100:96", "h200:16"]),
        ("gb200:..16", ["gb200:8", "gb200:16"]),
        ("h100:512..", ["h100:512", "h100:1024"]),
        ("h100:8..16, h100:16", ["h100:8", "h100:16"]),
    ],
)
def test_topologies_are_kinds_and_doubled_numbers(text, specs):
    assert topologies(text) == specs


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("h100", "'h100' is not GPU:NUMBER or GPU:FROM..TO"),
        ("h100:", "'h100:' is not GPU:NUMBER"),
        ("h100:64..8", "'h100:64..8' begins above its end"),
        ("h100:0..8", "begins above its end"),
        ("v100:8..64", "unknown GPU 'v100'"),
        ("h100:12", "multiple of 8"),
    ],
)
def test_what_are_no_topologies_is_refused(text, says):
    with pytest.raises(jshard.UserError, match=re.escape(says)):
        topologies(text)


def test_days_and_cost_are_those_of_the_fastest_that_fits():
    (answer,) = answers(Question(1e12, PRICES), "h100:64")
    rate = 10_000 * 64 / (1 + 64 / 256)  # of remat dots: none does not fit
    days = 1e12 / rate / DAY
    assert answer.best is not None
    assert answer.best.candidate.settings == {"policy.remat": "dots"}
    assert answer.days == pytest.approx((days, 0.9 * days, 1.2 * days))
    assert answer.gpu_hours == pytest.approx(24 * 64 * days)
    cost = 2.0 * 24 * 64 * days
    assert answer.cost == pytest.approx((cost, 0.9 * cost, 1.2 * cost))


def test_none_beats_the_front_in_both_days_and_cost():
    question = Question(1e12, PRICES)
    # An H200 is twice as fast for 1.5 times the price, and more of them cost more.
    found = answers(question, "h100:8", "h100:64", "h200:8", "h200:64")
    assert [x.topology for x in front(question, found)] == ["h200:64", "h200:8"]
    (slow,) = front(question, found[:1])
    assert slow.topology == "h100:8"


def test_of_two_as_fast_the_dearer_is_beaten():
    question = Question(1e12, Prices({"h100": 2.0, "a100": 1.0}))
    as_fast = searched("h100:8")
    cheap = question.answer(searched("a100:8", outcomes=as_fast.outcomes))
    dear = question.answer(as_fast)
    assert cheap.days == dear.days
    assert front(question, [dear, cheap]) == [cheap]
    assert front(question, [cheap, cheap._replace(topology="a100:8 again")])[0] == cheap


def test_days_and_a_budget_leave_out_what_is_late_or_dear():
    specs = ("h200:8", "h200:64", "h200:256")
    every = answers(Question(1e12, PRICES), *specs)
    days = [answer.days[0] for answer in every]
    costs = [answer.cost[0] for answer in every if answer.cost]
    late = Question(1e12, PRICES, days=(days[0] + days[1]) / 2)
    assert [x.topology for x in front(late, every)] == ["h200:256", "h200:64"]
    dear = Question(1e12, PRICES, budget=(costs[1] + costs[2]) / 2)
    assert [x.topology for x in front(dear, every)] == ["h200:64", "h200:8"]
    both = Question(1e12, PRICES, days=days[2] / 2, budget=1.0)
    assert front(both, every) == []
    said = answer_text.nothing(both, every)
    assert "the fastest, h200:256, takes" in said
    assert "the cheapest, h200:8, costs" in said


def test_without_prices_kinds_are_compared_with_themselves_by_gpu_hours():
    question = Question(1e12)
    found = answers(question, "h100:8", "h100:64", "h200:8")
    assert {x.topology for x in front(question, found)} == {
        "h100:8", "h100:64", "h200:8",
    }  # fmt: skip
    assert all(answer.cost is None for answer in found)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"outcomes": [Outcome(Candidate({}), error="Killed")]},
         "no candidate compiled: Killed"),
        ({"outcomes": [], "too_large": [(Candidate({}), 90 * 2**30)]},
         "does not fit: the closest needs at least 90.0 of 60.0 GiB"),
        ({"outcomes": [], "refused": [(Candidate({}), "--config.batch_size=8: no")]},
         "no mesh is possible: --config.batch_size=8: no"),
    ],
)  # fmt: skip
def test_where_nothing_is_possible_the_reason_is_said(more, why):
    question = Question(1e12, PRICES)
    answer = question.answer(searched("h100:8", **more))
    assert (answer.best, answer.why) == (None, why)
    text = "\n".join(answer_text.lines(question, [answer], "tokens", str))
    assert f"  h100:8: {why}" in text
    large = why.startswith("does not fit")
    assert ("Nothing fits: more GPUs" if large else "Nothing is possible") in text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("h100 = ", "is not TOML"),
        ("h100 = 2.5", "'h100' has no unit: a price stands under [per_gpu_hour]"),
        ("currency = 'USD'", "has no table [per_gpu_hour] with a line like"),
        ("currency = 3\n[per_gpu_hour]\nh100 = 1", "currency = 3 must be a text"),
        ("[per_gpu_hour]\nh100 = 0", "h100 = 0 must be a number above 0"),
        ("[per_gpu_hour]\nh100 = '2'", "h100 = '2' must be a number above 0"),
        ("[per_gpu_hour]\nh100 = nan", "h100 = nan must be a number above 0"),
    ],
)
def test_what_are_no_prices_is_refused(tmp_path, text, says):
    file = tmp_path / "prices.toml"
    file.write_text(text)
    with pytest.raises(jshard.UserError, match=re.escape(says)):
        read_prices(file)
    with pytest.raises(jshard.UserError, match="No such file"):
        read_prices(tmp_path / "none.toml")


def test_prices_have_a_currency_a_source_and_a_date(tmp_path):
    file = tmp_path / "prices.toml"
    file.write_text(
        'currency = "EUR"\nsource = "our contract"\ndate = 2026-11-01\n'
        "[per_gpu_hour]\nH100 = 2.5\n"
    )
    prices = read_prices(file)
    assert prices == Prices({"h100": 2.5}, "EUR", "our contract, 2026-11-01")
    assert (prices.of("h100:64"), prices.of("h200:8")) == (2.5, None)


def test_the_page_draws_every_answer_and_marks_those_that_none_beats():
    question = Question(15e12, PRICES)
    found = answers(question, "h100:8", "h100:64", "h200:8", "h200:64")
    found.append(question.answer(searched("l40s:8", outcomes=[])))
    page = answer_page.render(question, found, "tokens", lambda x: "train", "gpt.py")
    assert page.count("<circle") == 4
    assert page.count('r="6"') == len(front(question, found)) == 2
    assert "15T tokens; prices in USD, per GPU and hour: a contract, 2026-11-01" in page
    assert "nothing to compare" in page
    places = re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', page)
    assert all(70 <= float(x) <= 660 and 16 <= float(y) <= 376 for x, y in places)
    # More GPUs take fewer days, for more money: to the right and down.
    (x8, y8), (x64, y64) = [(float(x), float(y)) for x, y in places[:2]]
    assert x8 < x64
    assert y8 < y64


def guessed(spec: str, days: float = 1.0) -> Estimated:
    """Estimates of two candidates that fit, and of one that is faster and does not."""
    gpu, number = parse(spec)
    guesses = {"full": (1.5, 1), "dots": (1.0, 2), "none": (0.5, gpu.usable + 1)}
    found = {
        Candidate({"policy.remat": name}): Estimate(days * DAY * seconds, memory)
        for name, (seconds, memory) in guesses.items()
    }
    examples = dict.fromkeys(found, 8 * number)
    return Estimated(spec, gpu, 1e3, "tokens", found, examples, 4, [], [])


@pytest.fixture
def without_compiling(monkeypatch):
    """Answers that no compiler is asked for; returns what was compiled, with what."""
    asked = {}

    def compiled(path, overrides, found, order, limit, constants, report):
        asked[found.topology] = overrides, order, limit
        return searched(found.topology)

    def estimated(traces, spec, allowed, constants):
        assert {"policy.remat", "mesh", "policy.accumulate"} <= {*allowed}
        return guessed(spec, 4.0 if spec == "h100:8" else 1.0)

    monkeypatch.setattr(search_command, "compiled", compiled)
    monkeypatch.setattr(search_command, "estimated", estimated)
    monkeypatch.setattr(search_command, "require_plugin", lambda: None)
    return asked


def test_the_command_asks_each_topology_and_prints_what_to_run(
    plan, without_compiling, tmp_path
):
    prices = tmp_path / "prices.toml"
    prices.write_text('currency = "USD"\n[per_gpu_hour]\nh100 = 2.0\nh200 = 3.0\n')
    words = ["--config=llama.py:3-8b", "--topologies=h100:8..16,h200:16"]
    words += ["--tokens=15e12", f"--prices={prices}", "--config.batch_size=64"]
    files = [f"--{x}={tmp_path}/answer.{x}" for x in ("json", "html")]
    code, out, error = plan(*words, *files)
    assert code == 0, error
    # h100:8 is estimated to take eight times as long, for four times the money.
    assert [*without_compiling] == ["h100:16", "h200:16"]
    overrides, order, limit = without_compiling["h100:16"]
    assert overrides == {
        "policy.remat": "full", "policy.accumulate": 1, "batch_size": 64,
    }  # fmt: skip
    assert [x.settings["policy.remat"] for x in order] == ["dots", "full"]
    assert limit == 2
    assert re.search(r"^  h100:8 .* estimated ", out, re.M)
    assert "Estimated rows were not compiled" in out
    assert "15T tokens; prices in USD" in out
    assert "* h200:16" in out
    assert (
        "h200:16: python -m jshard.train --config=llama.py:3-8b "
        "--config.policy.remat=dots --config.policy.accumulate=1 "
        "--config.batch_size=64" in out
    )
    data = json.loads((tmp_path / "answer.json").read_text())
    assert [row["topology"] for row in data["answers"] if row["pareto"]] == ["h200:16"]
    assert [row["topology"] for row in data["answers"] if row["estimated"]] == [
        "h100:8"
    ]
    page = (tmp_path / "answer.html").read_text()
    assert "Days against cost" in page
    assert "Estimated rows were not compiled" in page


def test_if_what_was_compiled_does_not_fit_something_smaller_is(
    plan, without_compiling, monkeypatch
):
    orders = []

    def compiled(path, overrides, found, order, limit, constants, report):
        orders.append([x.settings["policy.remat"] for x in order])
        large = {"outcomes": [], "too_large": [(order[0], 90 * 2**30)]}
        return searched(found.topology, **(large if len(orders) == 1 else {}))

    monkeypatch.setattr(search_command, "compiled", compiled)
    words = ["--config=llama.py:3-8b", "--topologies=h100:8", "--tokens=1e9"]
    assert plan(*words, "--limit=1")[0] == 0
    assert orders == [["dots", "full"], ["full"]]


def test_what_no_run_confirms_has_no_range(plan, without_compiling, tmp_path):
    file = tmp_path / "answer.json"
    words = ["--config=llama.py:3-8b", "--topologies=h100:8", "--tokens=1e9"]
    assert plan(*words, f"--json={file}")[0] == 0
    (row,) = json.loads(file.read_text())["answers"]
    assert row["days_range"] == pytest.approx([0.9 * row["days"], 1.2 * row["days"]])
    (answer,) = answers(Question(1e9), "h100:8")
    assert answer.best is not None
    other = answer._replace(best=dataclasses.replace(answer.best, range=None))
    (row,) = as_dict(Question(1e9), [other], "tokens")["answers"]
    assert row["days_range"] is row["cost_range"] is None
    assert answer_text.row(Question(1e9), other)[6] == "not confirmed"


def test_estimates_are_corrected_by_the_nearest_compiled_step_and_are_no_answers():
    question = Question(1e9, PRICES)
    specs = ("h100:8", "h100:64", "h200:8")
    compiled = answers(question, *specs)
    guesses = {
        x.topology: x._replace(days=(x.days[0] / by,) * 3)
        for x, by in zip(compiled, (2.0, 3.0, 9.0), strict=True)
    }
    done = {x.topology: x for x in compiled}
    for spec, by in {
        "h100:16": 2,
        "h100:32": 3,
        "h200:512": 9,
        "b200:8": 54 ** (1 / 3),
    }.items():
        guesses[spec] = question.estimate(guessed(spec))
        assert compiled_over_estimated(spec, done, guesses) == pytest.approx(by)
    assert compiled_over_estimated("h100:16", {}, guesses) == 1
    assert middle_of_each_kind(guesses.values()) == ["h100:16", "h200:512", "b200:8"]
    one, four = (question.estimate(guessed("h100:16"), by) for by in (1.0, 4.0))
    assert four.days[0] == pytest.approx(4 * one.days[0])
    assert one.days[0] == pytest.approx(1e9 / (8 * 16 * 1e3))
    assert one.best is not None
    assert one.best.candidate.settings == {"policy.remat": "dots"}
    assert front(question, [one, *compiled]) == front(question, compiled)
    nothing = dataclasses.replace(guessed("h100:16"), estimates={})
    assert question.estimate(nothing).why == "nothing to compare"
    broken = dataclasses.replace(guessed("h100:16"), items=0.0, error="ValueError: a")
    assert question.estimate(broken).why == "no step could be traced: ValueError: a"
    large = dataclasses.replace(nothing, too_large=[(Candidate({}), 2**40)])
    assert "closest needs at least 1024.0 of" in question.estimate(large).why


def test_what_may_be_best_when_it_is_compiled_is_compiled():
    question = Question(1e9, PRICES)

    def guess(spec: str, days: float) -> Answer:
        return question.estimate(guessed(spec, days * 8 * 8 * 1e3 / 1e9))

    near = [guess("h100:8", 1.0), guess("h100:8", 1.09)._replace(topology="x")]
    assert worth_compiling(question, near) == ["h100:8", "x"]
    far = [guess("h100:8", 1.0), guess("h100:8", 1.11)._replace(topology="x")]
    assert worth_compiling(question, far) == ["h100:8"]
    assert worth_compiling(dataclasses.replace(question, days=0.95), far) == ["h100:8"]
    assert worth_compiling(dataclasses.replace(question, days=0.9), far) == []


def test_of_candidates_alike_the_simplest_is_first():
    found = guessed("h100:8")
    plain = Candidate({})
    fewer, more, fast = (Candidate({"policy.accumulate": n}) for n in (2, 4, 8))
    seconds = {more: 1.0, fewer: 1.005, plain: 1.001, fast: 0.9}
    estimates = {x: Estimate(s, 1) for x, s in seconds.items()}
    found = dataclasses.replace(
        found, estimates=estimates, examples=dict.fromkeys(estimates, 1000)
    )
    assert found.fastest() == [fast, plain, fewer, more]
    split = Candidate({"mesh.tensor": 2})
    found.estimates[split], found.examples[split] = Estimate(0.1, 1), 1000
    for settings in ({"policy.offload": "all"}, {"policy.remat": "offload:a"}):
        assert not Candidate(settings).is_plain
    assert Candidate({"policy.offload": None, "mesh.replica": 2}).is_plain
    assert found.fastest() == [fast, split, plain, fewer, more]
    del found.estimates[fast], found.estimates[plain], found.estimates[fewer]
    del found.estimates[more]
    assert found.fastest() == [split]


def test_if_nothing_is_in_time_the_exit_code_is_3(plan, without_compiling):
    words = ["--config=llama.py:3-8b", "--topologies=h100:8", "--tokens=15e12"]
    code, out, _ = plan(*words, "--days=0.5")
    assert code == 3
    assert "Nothing is in time and within the budget: the fastest, h100:8, takes" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--topologies=h100:8"], "how much to train on is missing: --tokens=15e12"),
        (["--topologies=h100:8", "--tokens=0.5"], "--tokens=0.5"),
        (["--topologies=h100:8", "--tokens=1e9", "--budget=5"], "needs --prices=FILE"),
        (["--topologies=h100:8", "--topology=h100:8"], "is given beside --topologies"),
        (["--topology=h100:8", "--tokens=1e9"], "--tokens: is asked of many"),
        (["--topologies=h100:8", "--tokens=1e9", "--trace=x.json"],
         "--trace: shows one plan, and --topologies asks for many"),
    ],
)  # fmt: skip
def test_questions_that_cannot_be_are_one_line(plan, without_compiling, words, says):
    code, _, error = plan("--config=llama.py:3-8b", *words)
    assert code == 2
    assert says in error
    assert error.count("\n") == 1
    assert not without_compiling


def test_a_kind_without_a_price_is_named(plan, without_compiling, tmp_path):
    prices = tmp_path / "prices.toml"
    prices.write_text("[per_gpu_hour]\nh100 = 2.0\n")
    words = ["--config=llama.py:3-8b", "--topologies=h100:8,h200:8", "--tokens=1e9"]
    code, _, error = plan(*words, f"--prices={prices}")
    assert code == 2
    assert "has no price of h200" in error


def test_no_prices_are_built_in():
    assert NO_PRICES.of("h100:8") is None
