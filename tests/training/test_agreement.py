"""What processes compare before the first step, and how differences are told."""

import dataclasses

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from jshard.recipe.config.run_config import complete, flatten
from jshard.recipe.load import open_recipe
from jshard.system.jobs.peers import Peers
from jshard.training.agreement import (
    agree,
    agree_on_program,
    facts_of,
    facts_of_jax,
)
from jshard.training.run.start import Start
from resumable import RECIPE


class Other(Peers):
    """The second of two processes; the first has other facts."""

    index, count = 1, 2

    def __init__(self, theirs: str):
        self.theirs = theirs

    def publish(self, name, text):
        return self.theirs

    def share(self, name, text):
        return ["", text]


class First(Peers):
    """The first of two, which says what it publishes."""

    count = 2
    said = ""

    def publish(self, name, text):
        self.said = text
        return text

    def share(self, name, text):
        return [text, ""]


def told(mine, theirs):
    first = First()
    agree(first, theirs)
    with pytest.raises(jshard.UserError) as error:
        agree(Other(first.said), mine)
    return str(error.value)


def test_equal_facts_agree():
    facts = {"config": {"steps": "5"}, "code": {"tiny.py": "abc"}}
    first = First()
    agree(first, facts)
    agree(Other(first.said), facts)


def test_a_process_alone_agrees_with_itself():
    agree(Peers(), {"config": {"steps": "5"}})


@pytest.mark.parametrize("kind", ["config", "package", "code", "parameter", "data"])
def test_a_difference_is_told_with_process_kind_name_and_both_values(kind):
    text = told({kind: {"a": "1", "b": "2"}}, {kind: {"a": "1", "b": "3"}})
    assert text == f"process 1 differs from process 0: {kind} b: 2, not 3"


def test_what_only_one_has_is_a_difference_and_many_are_cut_short():
    text = told({"config": {"x": "1"}}, {"config": {}})
    assert text.endswith("config x: 1, not absent")
    many = {str(i): "1" for i in range(10)}
    text = told({"config": many}, {"config": dict.fromkeys(many, "2")})
    assert text.endswith("config 2: 1, not 2; and 7 more")


@pytest.fixture
def facts(tmp_path):
    """Makes the facts of a run of the tiny recipe, changed."""
    (tmp_path / "tiny.py").write_text(RECIPE)

    def make(*, start=None, config=None, data=None, dtype=jnp.float32):
        with open_recipe(tmp_path / "tiny.py") as recipe:
            whole = complete(recipe.get_config(), "tiny.py")
            whole.update(config or {})
            data = data or recipe.make_data(whole, "train")
            state = {"w": jax.ShapeDtypeStruct((3,), dtype)}
            begun, given = start or Start(), {"train": data}
            return facts_of(recipe, flatten(whole), str(tmp_path), begun, state, given)

    return make


def changed(make, **changes):
    return told(make(**changes), make())


def test_facts_hold_config_parameters_start_and_data(facts, tmp_path):
    base = facts()
    assert set(base["package"]) >= {"python", "jax", "jaxlib", "flax", "optax"}
    assert "config steps: 7, not 100" in changed(facts, config={"steps": 7})
    text = changed(facts, dtype=jnp.bfloat16)
    assert "parameter ['w']: bfloat16[3], not float32[3]" in text
    later = dataclasses.replace(Start(), step=8, checkpoint=tmp_path / "8")
    assert "checkpoint at step: 8, not 0" in changed(facts, start=later)
    (tmp_path / "tiny.py").write_text(RECIPE + "\n# another line\n")
    assert "code tiny.py:" in told(facts(), base)


def test_datasets_that_differ_in_length_values_or_dtype_differ(facts):
    def data(count=100, **changes):
        def example(i):
            return {"tokens": np.full(3, changes.get(str(i), i), changes.get("dtype"))}

        return grain.MapDataset.range(count).map(example)

    base = facts(data=data())
    assert "data train examples: 99, not 100" in told(facts(data=data(99)), base)
    for place, index in {"first": 0, "early": 33, "middle": 49, "last": 99}.items():
        other = facts(data=data(**{str(index): 1000}))
        assert f"data train, {place} example:" in told(other, base)
    assert "data train, first example:" in told(facts(data=data(dtype=np.int32)), base)
    endless = facts(data=data().repeat())
    assert "data train examples: endless, not 100" in told(endless, base)


PROGRAM = "first\nadd 1.0\n  call @callback 140232\nlast\n"


def test_a_program_that_differs_is_told_by_its_first_line_and_callbacks_may():
    first = First()
    agree_on_program(first, PROGRAM)
    agree_on_program(Other(first.said), PROGRAM.replace("140232", "983121"))
    with pytest.raises(jshard.UserError, match=r"from line 2 of 3: add 1\.5; is "):
        agree_on_program(Other(first.said), PROGRAM.replace("1.0", "1.5"))
    with pytest.raises(jshard.UserError, match="from line 3 of 2: the end; "):
        agree_on_program(Other(first.said), PROGRAM.replace("last\n", ""))


def test_settings_of_jax_that_change_programs_are_facts_and_those_of_a_process_not():
    facts = facts_of_jax()
    changing = {"jax_threefry_partitionable", "jax_use_direct_linearize"}
    assert changing <= {*facts["jax.config"]}
    assert facts["devices"]["number"] == str(len(jax.local_devices()))
    with jax.threefry_partitionable(False):
        assert told(facts_of_jax(), facts).endswith(
            "jax.config jax_threefry_partitionable: False, not True"
        )
    before = jax.config.values["jax_compilation_cache_dir"]
    try:
        jax.config.update("jax_compilation_cache_dir", "/elsewhere")
        assert facts_of_jax() == facts
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
