"""No function, closure, class or primitive of JAX, Flax or Optax is replaced.

Nor by importing anything of jshard: tests/project/test_import.py asks a new process.
"""

import sys
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.extend import core

import jshard
from zoo_layers import Residual, example

MODULES = ("jax", "jax.lax", "jax.numpy", "jax.nn", "jax.random", "flax.nnx", "optax")


def public() -> dict[tuple, Any]:
    """What is behind public names: functions, their closures, rules and ``bind``."""
    found: dict[tuple, Any] = {}
    for module in MODULES:
        for name, value in vars(sys.modules[module]).items():
            if name.startswith("__"):
                continue
            found[module, name] = value
            if isinstance(value, FunctionType):
                found[module, name, "code"] = value.__code__
                for i, cell in enumerate(value.__closure__ or ()):
                    found[module, name, i] = cell.cell_contents
            elif isinstance(value, core.Primitive):
                found[module, name, "bind"] = vars(value).get("bind")
            elif isinstance(value, type):
                for attribute, member in vars(value).items():
                    if isinstance(member, (FunctionType, classmethod, staticmethod)):
                        found[module, name, attribute] = member
    for function in (jax.custom_vjp.__call__, jax.custom_jvp.__call__, lax.scan):
        for i, cell in enumerate(function.__closure__ or ()):
            found[function.__qualname__, i] = cell.cell_contents
    return found


def replaced(before: dict[tuple, Any]) -> list[tuple]:
    now = public()
    return [key for key, value in before.items() if now.get(key) is not value]


def test_nothing_is_replaced_before_while_and_after_a_step_is_traced():
    before, during = public(), []
    assert len(before) > 2000
    assert any(key[-1] == "bind" for key in before)

    def loss_fn(model, x):
        y = model(lax.scan(lambda c, x: (c + 1, x), 0.0, x)[1])
        during.append(replaced(before))
        return jshard.Mean(jnp.sum(y**2), len(x))

    fsdp = jshard.FSDP(jshard.make_mesh(replica=2), units=(Residual,))
    tx = optax.sgd(0.1)
    state = fsdp.abstract_state(lambda rngs: nnx.Sequential(Residual(rngs)), tx)
    for step in (fsdp.eval_step(loss_fn), fsdp.train_step(loss_fn, tx)):
        step.lower(state, np.asarray(example()))
    assert during == [[], []]
    assert replaced(before) == []


def test_what_is_replaced_would_be_found(monkeypatch):
    before = public()
    monkeypatch.setattr(lax, "scan", lambda *args: None)
    monkeypatch.setattr(nnx.Linear, "__call__", lambda self, x: x)
    monkeypatch.setattr(lax.add_p, "bind", lambda *args: None)
    assert set(replaced(before)) >= {
        ("jax.lax", "scan"),
        ("flax.nnx", "Linear", "__call__"),
        ("jax.lax", "add_p", "bind"),
    }
