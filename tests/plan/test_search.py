"""A search compiles its candidates and finds what no other beats."""

import json
import re

import pytest

from jshard.plan import __main__ as planner
from jshard.plan import has_plugin
from jshard.plan.output.search_text import lines
from jshard.plan.search.candidates import parse_search
from jshard.plan.search.pareto_search import search

RECIPE = """\
import os

from jshard.recipes import gpt

make_optimizer = gpt.make_optimizer
loss_fn = gpt.loss_fn
make_data = gpt.make_data


def get_config():
    config = gpt.get_config()
    config.model.num_layers = 2
    config.model.width = 64
    config.model.num_heads = 2
    config.batch_size = 16
    return config


def make_model(config, rngs):
    if config.policy.remat == "none" and config.policy.accumulate == 2:
        os.abort()
    return gpt.make_model(config, rngs)
"""

h100 = [
    pytest.mark.h100,
    pytest.mark.skipif(not has_plugin(), reason="pip install 'jshard[plan]'"),
]


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """The first and the second search of a recipe one of whose candidates aborts."""
    folder = tmp_path_factory.mktemp("search")
    (folder / "data").mkdir()
    (folder / "data" / "text.txt").write_text("to be or not to be " * 5000)
    file = folder / "tiny.py"
    file.write_text(RECIPE)
    given = {"data.path": str(folder / "data" / "text.txt")}
    listed = {"policy.remat": ("full", "none")}
    allowed = parse_search(["policy.accumulate"], listed, given)

    def command(candidate):
        return candidate.command("tiny.py", given)

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JSHARD_CACHE", str(folder / "cache"))
        for _ in range(2):
            result = search(file, given, "h100:8", allowed)
            found.append((result, command, "\n".join(lines(result, command, allowed))))
    return found


class TestSearch:
    pytestmark = h100

    def test_it_finds_what_fits_with_its_command_lines(self, searched):
        found, command, text = searched[0]
        assert found.considered == len(found.outcomes) == 4
        assert found.best
        for best in found.best:
            assert best.rate > 0
            assert 0 < best.memory < found.usable
            assert command(best.candidate) in text

    def test_a_candidate_that_aborts_is_told_and_the_others_go_on(self, searched):
        found, _, text = searched[0]
        failed = {str(o.candidate): o.error for o in found.failed}
        assert set(failed) == {"accumulate=2 remat=none"}
        assert all("SIGABRT" in error for error in failed.values())
        assert "1 failed" in text

    def test_again_nothing_is_compiled(self, searched):
        first, again = (found for found, *_ in searched)
        assert not any(o.cached for o in first.outcomes)
        assert all(o.cached for o in again.outcomes if not o.error)
        assert [(o.candidate, o.seconds) for o in again.best] == [
            (o.candidate, o.seconds) for o in first.best
        ]

    def test_it_is_json(self, searched):
        data = json.loads(json.dumps(searched[0][0].as_dict()))
        assert data["pareto"][0]["candidate"]["settings"] is not None
        assert len(data["outcomes"]) == 4


@pytest.mark.h100
@pytest.mark.skipif(not has_plugin(), reason="pip install 'jshard[plan]'")
def test_where_nothing_fits_the_closest_is_named_with_exit_code_3(monkeypatch, capsys):
    words = ["--config=llama.py:3-70b", "--topology=h100:8", "--search"]
    words += ["--config.policy.offload=None", "--config.policy.accumulate=1"]
    words += ["--config.policy.defer_scatter=False", "--config.policy.remat=full"]
    monkeypatch.setattr("sys.argv", ["jshard-plan", *words])
    with pytest.raises(SystemExit) as exit:
        planner.main()
    assert exit.value.code == 3
    text = capsys.readouterr().out
    counts = (
        r"^(\d+) candidates: 0 compiled.* 0 failed, (\d+) impossible, (\d+) cannot fit"
    )
    (found,) = re.findall(counts, text, re.M)
    total, impossible, too_large = map(int, found)
    assert total == impossible + too_large
    assert too_large
    assert "The closest needs at least" in text
    assert "--search of more: policy.remat" in text
