"""What CPUs do not compute is refused in one line, not in JAX's traceback."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from filled import filled
from parity import make_mesh

TX = optax.sgd(0.1)


def loss_fn(model: nnx.Linear, x_BTNH: jax.Array) -> jshard.Mean:
    x_BTNH = model(x_BTNH)
    x_BTNH = jax.nn.dot_product_attention(x_BTNH, x_BTNH, x_BTNH)
    return jshard.Mean(x_BTNH.sum(), len(x_BTNH))


def test_attention_in_float16_is_refused_in_one_line_that_says_what_to_write():
    precision = jshard.Precision(compute="float16")
    fsdp = jshard.FSDP(make_mesh(1, 1), jshard.Policy(precision=precision))
    model = filled(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    state = fsdp.from_model(model, TX)
    batch = fsdp.shard_batch(np.zeros((2, 3, 1, 4), np.float32))
    step = fsdp.train_step(loss_fn, TX)
    for run in (step, step.lower, fsdp.eval_step(loss_fn)):
        with pytest.raises(jshard.UserError, match=r"F16_F16_F32.*bfloat16") as raised:
            run(state, batch)
        assert "\n" not in str(raised.value)
