"""jshard.Trainer: a mistake is one line; data of each kind."""

import grain
import jax
import numpy as np
import pytest

from jshard.system.errors import UserError
from test_trainer import ROWS, loss_fn, make, values

pytestmark = pytest.mark.usefixtures("compiled_once")

# One line.


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"on_stepp": len}, "unknown argument 'on_stepp'; did you mean on_step?"),
        ({"on_step": lambda step: 1}, "on_step: <lambda>(step) is called as"),
        ({"on_step": 3}, "on_step=3 is not a function"),
        ({"loss_fn": 3}, "loss_fn in the recipe is not a function"),
        ({"loss_fn": None}, "the recipe lacks the function loss_fn()"),
        ({"config": {"eval_evry": 3}}, "unknown key 'eval_evry'; did you mean eval_e"),
        ({"config": {"epochs": 2}}, "unknown key 'epochs'; keys of your own"),
        ({"config": {"eval_evry": 1, "epochs": 2}}, "did you mean eval_every?"),
        ({"config": {"model": {"width": 2}}}, "unknown key 'model.width'; "),
        ({"config": {"policy.remt": "full"}}, "did you mean policy.remat?"),
        ({"config": {"steps": "many"}}, "steps='many'"),
        ({"train_data": []}, "a list without examples"),
        ({"train_data": {"inputs": ROWS, "y": ROWS[:3]}}, "same leading dimension"),
        ({"train_data": {"inputs": ROWS[:, :3]}}, "loss_fn: loss_fn() failed at"),
        ({"train_data": {"x": ROWS}}, "KeyError: 'inputs'"),
        ({"train_data": lambda: iter(())}, "has no examples"),
        ({"train_data": iter([{"inputs": ROWS[0]}] * 20)}, "ends in step 2 of 8"),
        ({"make_model": lambda config, rngs: 3}, "make_model"),
        (
            {"on_step": lambda trainer, step, metrics: 3},
            "on_step: <lambda> returned int; it must return a dict",
        ),
        (
            {"on_step": lambda trainer, step, metrics: {"x": np.ones(3)}},
            "returned 'x' of shape (3,)",
        ),
    ],
)
def test_a_mistake_is_one_line(given, said, tmp_path):
    with pytest.raises(UserError) as caught:
        make(tmp_path, **given).fit()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda t: t.predict({"x": ROWS}), "examples have no 'inputs', but 'x'"),
        (lambda t: t.predict([]), "without examples"),
        (lambda t: t.predict(ROWS, lambda m, b: b.sum()), "has no row for each of"),
        (lambda t: t.test(), "there are no test data: give test_data"),
        (lambda t: t.evaluate(iter([{"inputs": ROWS[0]}])), "can be read once"),
    ],
)
def test_a_mistake_in_use_is_one_line(act, said, tmp_path):
    with pytest.raises(UserError) as caught:
        act(make(tmp_path))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


# Data.


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grain", "list", "tuple", "generator", "function"])
def test_data_of_each_kind_train(kind, tmp_path, capsys):
    def rows():
        return ({"inputs": row} for row in ROWS)

    def tuple_loss(model, batch):
        return loss_fn(model, {"inputs": batch[0]})

    data, loss = {
        "grain": (grain.MapDataset.source(list(rows())).repeat(), loss_fn),
        "list": (list(rows()), loss_fn),
        "tuple": ((ROWS, ROWS[:, 0]), tuple_loss),
        "generator": (iter([*rows()] * 4), loss_fn),
        "function": (rows, loss_fn),
    }[kind]
    trainer = make(tmp_path, train_data=data, loss_fn=loss).fit()
    assert int(trainer.state.step) == 8
    out = capsys.readouterr().out
    (note,) = [line for line in out.splitlines() if line.startswith("data   ")]
    is_stream = kind in ("generator", "function")
    assert ("a run that resumes reads it from the start and skips" in note) is is_stream
    assert ("rows: 3 steps per epoch" in note) is not is_stream


@pytest.mark.slow
def test_a_function_of_a_stream_goes_on_bit_for_bit_where_it_was(tmp_path):
    def rows():
        return ({"inputs": row} for row in ROWS)

    config = {"checkpoint.every": 4}
    whole = make(tmp_path / "whole", train_data=rows, config=config).fit()
    make(tmp_path, train_data=rows, config=config | {"steps": 5}).fit()
    part = make(tmp_path, train_data=rows, config=config).fit()
    same = jax.tree.map(np.array_equal, *map(values, (part, whole)))
    assert all(jax.tree.leaves(same))
