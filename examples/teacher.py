"""A student and a teacher that follows it, as in BYOL, DINO and target networks.

    python examples/teacher.py

The teacher's weights are frozen, so that they are sharded and have no optimizer state.
Between steps they move towards the student's.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jshard

WIDTH, EXAMPLES, STEPS = 64, 128, 100


class Encoder(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x_BD):
        return self.down(nnx.gelu(self.up(x_BD)))


class Pair(nnx.Module):
    def __init__(self, rngs):
        self.student, self.teacher = Encoder(rngs), Encoder(rngs)
        self.predict = nnx.Linear(WIDTH, WIDTH, rngs=rngs)


def loss_fn(model, batch):
    """One view of an image must predict what the teacher makes of the other."""
    student = model.predict(model.student(batch["first"]))
    teacher = jax.lax.stop_gradient(model.teacher(batch["second"]))
    losses = 1 - optax.cosine_similarity(student, teacher)
    return jshard.Mean(jnp.sum(losses), losses.size)


@functools.partial(jax.jit, donate_argnums=0)
def follow(state, decay=0.99):
    """Moves the teacher towards the student, each device its own shards."""
    students = dict(nnx.to_flat_state(state.params))

    def move(path, teacher):
        student = students["student", *path[1:]]
        mean = decay * teacher.get_value() + (1 - decay) * student.get_value()
        return teacher.copy(mean)

    return dataclasses.replace(state, frozen=nnx.map_state(move, state.frozen))


def main():
    optimizer = optax.adamw(1e-3)
    fsdp = jshard.FSDP(jshard.make_mesh(), units=(nnx.Linear,))
    all_but_teacher = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("teacher")))
    state = fsdp.init(Pair, optimizer, wrt=all_but_teacher)
    train_step, rng = fsdp.train_step(loss_fn, optimizer), np.random.default_rng(0)
    for step in range(STEPS):
        x_BD = rng.normal(size=(EXAMPLES, WIDTH)).astype(np.float32)
        noise = rng.normal(scale=0.1, size=(2, EXAMPLES, WIDTH)).astype(np.float32)
        batch = {"first": x_BD + noise[0], "second": x_BD + noise[1]}
        state, metrics = train_step(state, fsdp.shard_batch(batch))
        state = follow(state)
        if step % 20 == 0 or step == STEPS - 1:
            print(f"step {step}  loss {metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
