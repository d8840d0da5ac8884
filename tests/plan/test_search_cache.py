"""What a search keeps: plans and estimates, each under what determines it."""

import dataclasses
import gzip
import importlib.util
import sys
from typing import Any

import pytest

from answered import guessed
from jshard.plan import has_plugin
from jshard.plan.fit.hardware import GPU
from jshard.plan.search import pareto_search
from jshard.plan.search.candidates import Candidate
from jshard.plan.search.estimated import read_estimated, write_estimated
from jshard.plan.search.pareto_search import Asked, compiled, estimated
from jshard.plan.search.result_cache import (
    hash_of_sources,
    read_result,
    step_key,
    write_result,
)
from jshard.plan.search.traces import Traces
from jshard.plan.topology import parse
from jshard.recipe.load import open_recipe
from jshard.system.cli.paths import cache_folder

ALLOWED = {"policy.remat": None, "batch_size": (8, 16)}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """The folder of the cache, which no other test writes."""
    monkeypatch.setenv("JSHARD_CACHE", str(tmp_path / "cache"))
    folder = cache_folder("plan")
    assert folder == tmp_path / "cache" / "plan"
    return folder


def test_results_are_kept_and_damaged_ones_are_ignored(cache):
    assert read_result(cache, "k") is None
    write_result(cache, "k", {"seconds": 1.5})
    assert read_result(cache, "k") == {"seconds": 1.5}
    file = cache / "k.json.gz"
    whole = file.read_bytes()
    texts = ("", "{", '{"key": "other", "result": {}}', '{"key": "k"}', "[]")
    for damage in (whole[:-9], b"", b"{}", *(gzip.compress(x.encode()) for x in texts)):
        file.write_bytes(damage)
        with pytest.warns(UserWarning, match="ignored a damaged cache file"):
            assert read_result(cache, "k") is None


def test_a_cache_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "plan").write_text("a file")
    with pytest.warns(UserWarning, match="not cached: cannot write"):
        write_result(tmp_path / "plan", "k", {})


def test_estimates_come_back_as_they_were_for_what_was_asked_alone(cache):
    given, as_given = guessed("h100:16"), Candidate({})
    settings = {"policy.offload": None, "mesh.replica": 2, "policy.defer_scatter": True}
    found = dataclasses.replace(
        given,
        refused=[(as_given, "no such mesh")],
        too_large=[(Candidate(settings), 2**40)],
        key="a",
    )
    write_estimated(cache, found, ALLOWED)
    asked = cache, "h100:16", found.gpu
    assert read_estimated(*asked, ALLOWED, "a") == found
    assert read_estimated(*asked, ALLOWED, "b") is None
    assert read_estimated(*asked, ALLOWED | {"batch_size": (8, 32)}, "a") is None
    assert read_estimated(*asked, {"policy.remat": None}, "a") is None


class Traced(Traces):
    """Stands in for the traces of a recipe."""

    def __init__(self, key: str):
        self._key = key

    def key(self, topology: str, gpu: GPU) -> str:
        return f"{self._key} {topology} {gpu.host}" if self._key else ""


def test_candidates_are_estimated_once_unless_their_step_cannot_be_traced(monkeypatch):
    made = []

    def make(traces, topology, gpu, allowed):
        made.append(topology)
        return dataclasses.replace(guessed(topology), gpu=gpu)

    monkeypatch.setattr(pareto_search, "_estimated", make)
    for topology in ("h100:8", "h100:16", "h100:8"):
        assert estimated(Traced("a"), topology, ALLOWED).key == f"a {topology} 8"
    assert made == ["h100:8", "h100:16"]
    for _ in range(2):
        assert estimated(Traced(""), "h100:8", ALLOWED).key == ""
    assert made[2:] == ["h100:8", "h100:8"]


def test_plans_and_refusals_are_kept_and_what_died_is_tried_again(monkeypatch):
    commands, told = [], []
    figures = {"seconds": 1.0, "memory": 2**30, "rate": 5.0, "cached": False}
    replies = {
        "full": {"figures": figures, "unit": "tokens", "warnings": ["it is slow"]},
        "dots": {"error": "no such mesh", "refused": True, "warnings": []},
        "none": {"error": "died by SIGABRT"},
    }

    def run(asked, environment, *, at_a_time):
        commands.append([next(x for x in replies if x in words[-1]) for words in asked])
        yield from enumerate(map(replies.get, commands[-1]))

    monkeypatch.setattr(pareto_search, "run_each", run)
    order = [Candidate({"policy.remat": x}) for x in replies]

    def ask(key, *which):
        found = dataclasses.replace(guessed("h100:8"), key=key)
        report = lambda *words: told.append(words[:2])
        asked = [Asked(found, [order[i] for i in which], 3)]
        (searched,) = compiled("tiny.py", {}, asked, report=report)
        return searched

    first, again, other = ask("a", 0, 1, 2), ask("a", 2, 1, 0), ask("b", 0)
    assert commands == [["full", "dots", "none"], ["none"], ["full"]]
    assert told == [(1, 3), (2, 3), (3, 3)] * 2 + [(1, 1)]
    for searched, cached in ((first, False), (again, True), (other, False)):
        (made,) = [x for x in searched.outcomes if not x.error]
        assert (made.candidate, made.rate, made.cached) == (order[0], 5.0, cached)
        assert searched.warnings == ["it is slow"]
        assert searched.unit == "tokens"
    for searched in (first, again):
        assert searched.refused == [(order[1], "no such mesh")]
        assert [x.candidate for x in searched.failed] == [order[2]]
    ask("", 0)
    ask("", 0)
    assert commands[3:] == [["full"], ["full"]]  # what determines it is not known


def test_a_key_changes_with_all_that_may_change_a_plan(monkeypatch, tmp_path):
    gpu, _ = parse("h100:8")
    values = {"batch_size": 8, "mesh.replica": 1, "policy.offload": None}
    given: dict[str, Any] = {"digest": "d", "values": values, "topology": "h100:8"}
    given |= {"gpu": gpu, "sources": "s"}
    keys = [step_key(**given)]
    quicker = dataclasses.replace(gpu.constants, link=0.5)
    changes: tuple[dict[str, Any], ...] = (
        {"digest": "e"},
        {"values": values | {"mesh.replica": "hosts"}},
        {"topology": "h100:16"},
        {"gpu": dataclasses.replace(gpu, constants=quicker)},
        {"sources": "t"},
    )
    keys += [step_key(**given | changed) for changed in changes]
    monkeypatch.setenv("XLA_FLAGS", "--xla_something=true")
    keys.append(step_key(**given))
    assert len({*keys}) == len(keys)


def test_sources_are_those_of_loaded_modules(monkeypatch, tmp_path):
    before = hash_of_sources()
    file = tmp_path / "my_layers.py"
    file.write_text("x = 1\n")
    assert hash_of_sources() == before
    spec = importlib.util.spec_from_file_location("my_layers", file)
    assert spec is not None
    monkeypatch.setitem(sys.modules, "my_layers", importlib.util.module_from_spec(spec))
    loaded = hash_of_sources()
    assert loaded != before
    file.write_text("x = 2\n")
    assert hash_of_sources() not in (before, loaded)


RECIPE = """\
from jshard.recipes import gpt

get_config, make_optimizer, loss_fn = gpt.get_config, gpt.make_optimizer, gpt.loss_fn
make_data = gpt.make_data


def make_model(config, rngs):
    if config.policy.remat == "none":
        config = config.copy_and_resolve_references()
        config.model.width = 512
    return gpt.make_model(config, rngs)
"""


@pytest.mark.h100
@pytest.mark.skipif(not has_plugin(), reason="pip install 'jshard[plan]'")
def test_a_recipe_has_one_key_until_its_file_config_or_data_changes(tmp_path):
    gpu, _ = parse("h100:8")
    (tmp_path / "text.txt").write_text("to be or not to be " * 5000)
    file = tmp_path / "tiny.py"
    given = {"data.path": str(tmp_path / "text.txt"), "policy.remat": "full"}
    given |= {"policy.accumulate": 1, "model.num_layers": 2}

    def key(text: str, **more: Any) -> str:
        file.write_text(text)
        with open_recipe(file) as recipe:
            return Traces(recipe, given | more).key("h100:8", gpu)

    one = key(RECIPE)
    assert one
    assert key(RECIPE) == one
    others = [key(RECIPE.replace("512", "256"))]  # which the given step is without
    others += [
        key(RECIPE, **more) for more in ({"batch_size": 64}, {"mesh.replica": 2})
    ]
    assert len({one, *others}) == 4
    assert key(RECIPE.replace("gpt.loss_fn", "lambda model, batch: 1 / 0")) == ""
