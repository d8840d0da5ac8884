"""Where arrays live is decided once, and the same for all who need to know."""

import jax
import numpy as np
import optax
import pytest

import jshard
import zoo
from jshard.sharding.layout import state_layout as module
from jshard.sharding.layout.state_layout import Layout
from runs import loss_fn
from zoo_layers import example

OPTIMIZER = optax.adamw(1e-3)
POLICY = jshard.Policy(min_shard_elements=0, ema_decay=0.9, accumulate=2)


@pytest.fixture
def fsdp():
    return jshard.FSDP(jshard.make_mesh(replica=2), POLICY)


def test_a_trace_decides_once_where_a_parameter_lives(fsdp, monkeypatch):
    state = fsdp.abstract_state(zoo.Aux, OPTIMIZER)
    decided = []

    def sharded_dim(variable, *arguments):
        decided.append(variable)
        return original(variable, *arguments)

    original = module.sharded_dim
    monkeypatch.setattr(module, "sharded_dim", sharded_dim)
    fsdp.train_step(loss_fn, OPTIMIZER).trace(state, np.asarray(example()))
    assert len(decided) == len(jax.tree.leaves((state.params, state.frozen))) > 0


def test_a_state_and_its_abstract_form_have_one_layout(fsdp):
    concrete = fsdp.init(zoo.Aux, OPTIMIZER)
    layout = Layout.of(concrete, POLICY, fsdp.mesh)
    abstract = fsdp.abstract_state(zoo.Aux, OPTIMIZER)
    assert layout == Layout.of(abstract, POLICY, fsdp.mesh)
    assert any(place.sharding.dim is not None for place in layout.places.values())
    for state in (concrete, abstract):
        found = [x.sharding for x in jax.tree.leaves(state)]
        assert found == jax.tree.leaves(layout.shardings)
