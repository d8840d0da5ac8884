"""`--topologies`: what is estimated, what is compiled, and what the command says."""

import dataclasses
import json
import re

import pytest

from answered import PRICES, answers, guessed, searched
from jshard.plan import search_command
from jshard.plan.output import answer_text
from jshard.plan.search.answers import (
    Answer,
    Question,
    as_dict,
    compiled_over_estimated,
    front,
    middle_of_each_kind,
    worth_compiling,
)
from jshard.plan.search.candidates import Candidate
from jshard.plan.search.estimates import Estimate


@pytest.fixture
def without_compiling(monkeypatch):
    """Answers that no compiler is asked for; returns what was compiled, with what."""
    asked = {}

    def compiled(path, overrides, jobs, constants, report):
        for found, order, limit in jobs:
            asked[found.topology] = overrides, order, limit
        return [searched(found.topology) for found, *_ in jobs]

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

    def compiled(path, overrides, jobs, constants, report):
        ((found, order, _),) = jobs
        orders.append([x.settings["policy.remat"] for x in order])
        large = {"outcomes": [], "too_large": [(order[0], 90 * 2**30)]}
        return [searched(found.topology, **(large if len(orders) == 1 else {}))]

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
