"""Warnings name the line of the user's that led to them."""

from typing import Any

import jax
import pytest

from jshard.system.errors import warn


@pytest.mark.parametrize(
    ("module", "is_users"),
    [("jshard.inner", False), ("jshard.models.gpt", True), ("theirs", True)],
)
def test_a_warning_is_at_the_users_line_past_jshard_and_jax(module, is_users):
    made: dict[str, Any] = {"__name__": module, "warn": warn}
    exec("def tell(x):\n    warn('mind')\n    return x", made)
    with pytest.warns(UserWarning, match="mind") as found:
        jax.eval_shape(made["tell"], 1.0)
    assert [x.filename for x in found] == ["<string>" if is_users else __file__]
