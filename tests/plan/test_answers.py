"""`--topologies`: which GPUs, how many, how long and how much."""

import re

import pytest

import jshard
from answered import DAY, PRICES, answers, searched
from jshard.plan.output import answer_page, answer_text
from jshard.plan.search.answers import (
    NO_PRICES,
    Question,
    front,
    topologies,
)
from jshard.plan.search.candidates import Candidate
from jshard.plan.search.outcomes import Outcome
from jshard.plan.search.prices import Prices, read_prices


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


def test_no_prices_are_built_in():
    assert NO_PRICES.of("h100:8") is None
