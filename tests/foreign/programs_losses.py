"""Losses that are more than a mean over examples: several optimizers, derivatives in
the loss, collectives that the user wrote."""

# Layers take and return what they like.
# pyright: reportIncompatibleMethodOverride=false

import itertools

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from compare import EXAMPLES, WIDTH, Phase, Program, linear, normal, program


class Mlp(nnx.Module):
    def __init__(self, sizes, rngs):
        pairs = itertools.pairwise(sizes)
        self.layers = nnx.List([linear(a, b, rngs) for a, b in pairs])

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = jnp.tanh(layer(x))
        return self.layers[-1](x)


def mlp(*sizes):
    return lambda rngs: Mlp(sizes, rngs)


# A GAN: two networks, each with its optimizer.


class Gan(nnx.Module):
    def __init__(self, rngs):
        self.generator = Mlp((3, WIDTH, 5), rngs)
        self.discriminator = Mlp((5, WIDTH, 1), rngs)


def discriminator_loss(model, batch):
    fake = lax.stop_gradient(model.generator(batch["noise"]))
    of_real = jax.nn.softplus(-model.discriminator(batch["real"]))
    of_fake = jax.nn.softplus(model.discriminator(fake))
    return jnp.sum(of_real + of_fake), len(fake)


def generator_loss(model, batch):
    fake = model.generator(batch["noise"])
    return jnp.sum(jax.nn.softplus(-model.discriminator(fake))), len(fake)


def real_and_noise(rng):
    real, noise = rng.normal(1, size=(EXAMPLES, 5)), rng.normal(size=(EXAMPLES, 3))
    return {"real": real, "noise": noise}


def part(name):
    return nnx.All(nnx.Param, nnx.PathContains(name))


# Contrastive losses, over all examples of all devices.


def axes():
    """The names to sum over: none on one device."""
    return jax.sharding.get_abstract_mesh().manual_axes


def gathered(x):
    return lax.all_gather(x, axes(), tiled=True) if axes() else x


class Clip(nnx.Module):
    def __init__(self, rngs):
        self.image, self.text = Mlp((6, WIDTH, 4), rngs), Mlp((3, WIDTH, 4), rngs)
        self.log_scale = nnx.Param(jnp.asarray(1.0, dtype=float))

    def __call__(self, batch):
        pair = self.image(batch["image"]), self.text(batch["text"])
        return [x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in pair]


def pairs(rng):
    image, text = rng.normal(size=(EXAMPLES, 6)), rng.normal(size=(EXAMPLES, 3))
    return {"image": image, "text": text}


def clip_loss(model, batch):
    """Each device has the rows of its own images and texts."""
    image, text = model(batch)
    first = lax.axis_index(axes()) * len(image) if axes() else 0
    labels = first + jnp.arange(len(image))
    scale = jnp.exp(model.log_scale[...])
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    losses = cross_entropy(scale * image @ gathered(text).T, labels)
    losses += cross_entropy(scale * text @ gathered(image).T, labels)
    return jnp.sum(losses) / 2, len(image)


def whole_clip_loss(model, batch):
    """Each device computes the loss of all pairs, as OpenAI's own code does."""
    image, text = map(gathered, model(batch))
    logits = jnp.exp(model.log_scale[...]) * image @ text.T
    match = lambda logits: -jnp.trace(jax.nn.log_softmax(logits))
    return (match(logits) + match(logits.T)) / 2, len(image)


def barlow_loss(model, batch):
    """Cross-correlations over the global batch, by sums over devices."""
    one, two = model(batch)
    total = lambda x: lax.psum(x, axes()) if axes() else x
    count = total(len(one))
    for_each = lambda x: jnp.sqrt(total(jnp.sum(x**2, axis=0)) / count)
    correlation = total(one.T @ two) / count / (for_each(one) * for_each(two)[:, None])
    off = correlation * (1 - jnp.eye(len(correlation)))
    on = jnp.sum((jnp.diag(correlation) - 1) ** 2)
    return on + 0.1 * jnp.sum(off**2), 1


class Siamese(nnx.Module):
    def __init__(self, rngs):
        self.tower = Mlp((4, WIDTH, 5), rngs)

    def __call__(self, one, two):
        return jnp.sum((self.tower(one) - self.tower(two)) ** 2, axis=-1)


def siamese_loss(model, batch):
    distances = model(batch["one"], batch["two"])
    margins = nnx.relu(1 - distances)
    return jnp.sum(jnp.where(batch["same"], distances, margins)), len(distances)


def siamese_pairs(rng):
    one, two = rng.normal(size=(2, EXAMPLES, 4))
    return {"one": one, "two": two, "same": rng.random(EXAMPLES) < 0.5}


# Derivatives within the loss.


def maml_loss(model, tasks):
    """Each example is a task: a step on its support, the loss of its query."""
    graphdef, params = nnx.split(model)

    def loss(params, x, y):
        return jnp.mean((nnx.merge(graphdef, params)(x) - y) ** 2)

    def after_a_step(x, y, query_x, query_y):
        grads = jax.grad(loss)(params, x, y)
        adapted = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return loss(adapted, query_x, query_y)

    losses = jax.vmap(after_a_step)(*(tasks[k] for k in ("x", "y", "qx", "qy")))
    return jnp.sum(losses), len(losses)


def tasks(rng):
    sizes = {"x": 3, "y": 1, "qx": 3, "qy": 1}
    return {k: rng.normal(size=(EXAMPLES, 4, n)) for k, n in sizes.items()}


def gradient_penalty(model, x):
    """A critic's, as in WGAN-GP: a gradient of gradients."""
    slopes = jax.grad(lambda x: jnp.sum(model(x)))(x)
    penalty = (jnp.linalg.norm(slopes, axis=-1) - 1) ** 2
    return jnp.sum(model(x)[:, 0] + 10 * penalty), len(x)


def physics_informed(model, x):
    """The residual of u'' + u = sin(x), and a boundary value."""
    u = lambda x: model(x[None])[0]
    residual = jax.vmap(lambda x: jax.grad(jax.grad(u))(x) + u(x) - jnp.sin(x))(x[:, 0])
    return jnp.sum(residual**2) + len(x) * u(jnp.zeros(()))[...] ** 2, len(x)


def score_matching(model, batch):
    """Sliced: a Hessian-vector product of an energy."""
    x, v = batch["x"], batch["v"]
    score = jax.grad(lambda x: -jnp.sum(model(x)))
    value, along_v = jax.jvp(score, (x,), (v,))
    return jnp.sum(v * along_v) + jnp.sum(value**2) / 2, len(x)


def tangent_loss(model, batch):
    """A flow's: the derivative along a direction, forward."""
    y, slope = jax.jvp(model, (batch["x"],), (batch["v"],))
    return jnp.sum((y - batch["v"]) ** 2 + slope**2), len(y)


def points_and_directions(rng):
    x, v = rng.normal(size=(2, EXAMPLES, 4))
    return {"x": x, "v": v}


# Reinforcement learning: a policy that acts within a scan over time.


def policy_gradient(policy, batch):
    def act(state, chance):
        logits = policy(state)[:, 0]
        action = chance < jax.nn.sigmoid(lax.stop_gradient(logits))
        log_prob = -jax.nn.softplus(jnp.where(action, -logits, logits))
        push = jnp.where(action, 0.3, -0.3)[:, None]
        state = 0.9 * state + push * jnp.asarray([1.0, -1.0, 0.5])
        return state, (log_prob, -jnp.sum(state**2, axis=-1))

    _, (log_probs, rewards) = lax.scan(act, batch["start"], batch["chances"].T)
    returns = jnp.cumsum(rewards[::-1], axis=0)[::-1]
    return -jnp.sum(log_probs * lax.stop_gradient(returns)), log_probs.size


def episodes(rng):
    return {
        "start": rng.normal(size=(EXAMPLES, 3)),
        "chances": rng.random((EXAMPLES, 6)),
    }


LAYERS = (nnx.Linear,)
PROGRAMS = {
    "gan": Program(
        Gan,
        (
            Phase(discriminator_loss, part("discriminator")),
            Phase(generator_loss, part("generator"), optax.sgd(0.05)),
        ),
        real_and_noise,
        (Mlp,),
        (8, True),
    ),
    "clip": program(Clip, clip_loss, pairs, (Mlp,), (8, True)),
    "clip-whole": program(Clip, whole_clip_loss, pairs, (Mlp,), (4, False)),
    "barlow": program(Clip, barlow_loss, pairs, (Mlp,), (4, True)),
    "siamese": program(Siamese, siamese_loss, siamese_pairs, (Mlp,), (3, True)),
    "maml": program(mlp(3, WIDTH, 1), maml_loss, tasks, LAYERS, (2, True)),
    "gradient-penalty": program(
        mlp(4, WIDTH, 1), gradient_penalty, normal(4), LAYERS, (8, True)
    ),
    "physics-informed": program(
        mlp(1, WIDTH, 1), physics_informed, normal(1), LAYERS, (1, True)
    ),
    "score-matching": program(
        mlp(4, WIDTH, 1), score_matching, points_and_directions, LAYERS, (2, True)
    ),
    "tangent": program(
        mlp(4, WIDTH, 4), tangent_loss, points_and_directions, (), (3, False)
    ),
    "policy-gradient": program(
        mlp(3, WIDTH, 1), policy_gradient, episodes, LAYERS, (8, True)
    ),
}
