"""Losses of preferences against their papers' formulas."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import jshard
from filled import filled
from jshard.models.llama import Llama, LlamaConfig
from jshard.nn.preference import DPO_KINDS, Answers, dpo, orpo, sum_of_answers
from jshard.recipes import preference
from jshard.sharding.settings.loss import as_loss
from jshard.sharding.settings.mesh import split_sequences
from parity import by_path, error

RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(1, 9, (2, 6)).astype(float)
POLICY, REFERENCE = -RNG.uniform(0.05, 3, (2, 2, 6)) * LENGTHS


def answers(sums: Any, lengths: Any = LENGTHS) -> Answers:
    return Answers(*map(jnp.asarray, (*sums, *lengths)))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("length_normalized", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_is_its_formula(x64, smoothing, length_normalized):
    options = {"label_smoothing": smoothing, "length_normalized": length_normalized}
    loss, metrics = dpo(answers(POLICY), answers(REFERENCE), beta=0.3, **options)
    ratios = POLICY - REFERENCE
    scores = ratios / LENGTHS if length_normalized else ratios
    p = sigmoid(0.3 * (scores[0] - scores[1]))
    want = -(1 - smoothing) * np.log(p) - smoothing * np.log(1 - p)
    np.testing.assert_allclose(loss.compute(), want.mean(), rtol=1e-12)
    chosen, rejected = 0.3 * ratios
    means = {
        "reward_chosen": chosen.mean(),
        "reward_rejected": rejected.mean(),
        "reward_accuracy": (chosen > rejected).mean(),
        "reward_margin": (chosen - rejected).mean(),
    }
    assert 0 < means["reward_accuracy"] < 1
    got = {name: float(mean.compute()) for name, mean in metrics.items()}
    assert got == pytest.approx(means, rel=1e-12)


@pytest.mark.parametrize("length_normalized", [False, True])
@pytest.mark.parametrize("kind", ["robust", "hinge", "ipo"])
def test_other_losses_with_a_reference_are_their_formulas(x64, kind, length_normalized):
    smoothing = 0.2 if kind == "robust" else 0.0
    loss, metrics = dpo(
        answers(POLICY),
        answers(REFERENCE),
        beta=0.3,
        kind=kind,
        label_smoothing=smoothing,
        length_normalized=length_normalized,
    )
    ratios = POLICY - REFERENCE
    scores = ratios / LENGTHS if length_normalized or kind == "ipo" else ratios
    margin = scores[0] - scores[1]
    p = sigmoid(0.3 * margin)
    want = {
        "robust": (0.2 * np.log(1 - p) - 0.8 * np.log(p)) / (1 - 2 * 0.2),
        "hinge": np.where(0.3 * margin < 1, 1 - 0.3 * margin, 0),
        "ipo": (margin - 1 / (2 * 0.3)) ** 2,
    }[kind]
    np.testing.assert_allclose(loss.compute(), want.mean(), rtol=1e-12)
    assert metrics.keys() == dpo(answers(POLICY), answers(REFERENCE), beta=1)[1].keys()


def test_a_model_that_is_its_reference_has_the_loss_of_no_preference(x64):
    config = preference.get_config()
    config.preference.beta = 0.3
    for kind in DPO_KINDS:
        loss, _ = dpo(answers(POLICY), answers(POLICY), beta=0.3, kind=kind)
        config.preference.loss = kind
        want = preference.references(config)["no preference"]
        np.testing.assert_allclose(loss.compute(), want, rtol=1e-12)


def test_losses_without_label_smoothing_refuse_it():
    for kind in ("hinge", "ipo"):
        with pytest.raises(jshard.UserError, match="is for dpo and robust"):
            dpo(*[answers(POLICY)] * 2, beta=1, kind=kind, label_smoothing=0.1)
        config = preference.get_config()
        config.preference.update({"loss": kind, "label_smoothing": 0.1})
        with pytest.raises(
            jshard.UserError, match=f"leave it out with preference.loss={kind}"
        ):
            preference.check(config)
    with pytest.raises(jshard.UserError, match="kind='aot' is not one of dpo, robust"):
        dpo(*[answers(POLICY)] * 2, beta=1, kind="aot")


def test_preferences_are_taken_for_right_and_answers_for_whole(x64):
    given = answers(POLICY), answers(REFERENCE)
    plain, _ = dpo(*given, beta=0.3)
    said, _ = dpo(*given, beta=0.3, label_smoothing=0.0, length_normalized=False)
    assert plain.compute() == said.compute()


def test_orpo_is_its_formula(x64):
    texts = jshard.Mean(jnp.asarray(30.0), 10)
    loss, metrics = orpo(answers(POLICY), texts, beta=0.2)
    means = POLICY / LENGTHS
    odds = np.exp(means) / (1 - np.exp(means))
    ratio = -np.log(sigmoid(np.log(odds[0] / odds[1])))
    want = 3.0 + 0.2 * ratio.mean()
    np.testing.assert_allclose(loss.compute(), want, rtol=1e-12)
    assert float(metrics["reward_chosen"].compute()) == pytest.approx(
        0.2 * means[0].mean()
    )
    assert float(metrics["chosen_loss"].compute()) == 3.0


def test_orpo_has_gradients_for_answers_of_any_probability(x64):
    def loss(sums):
        texts = jshard.Mean(jnp.zeros(()), 1)
        policy = answers(sums, np.ones((2, 4)))
        return as_loss(orpo(policy, texts, beta=1.0)[0]).compute()

    sums = -np.asarray([[1e-9, 0.0, 0.5, 700.0], [0.0, 1e-9, 0.0, 1.0]])
    for x in (sums, sums.astype(np.float32)):
        value, gradient = jax.device_get(jax.jit(jax.value_and_grad(loss))(x))
        assert np.isfinite(value)
        assert np.all(np.isfinite(gradient))
    assert np.all(gradient[sums == 0] == 0)


def test_answers_are_summed_where_they_are():
    log_probs_RT = jnp.asarray([[-1.0, -2.0, jnp.nan], [-4.0, -8.0, -16.0]])
    is_answer_RT = jnp.asarray([[False, True, False], [True, True, False]])
    sums, lengths = sum_of_answers(log_probs_RT, is_answer_RT)
    np.testing.assert_array_equal(sums, [-2, -12])
    np.testing.assert_array_equal(lengths, [1, 2])


def test_answers_are_summed_over_the_parts_of_their_sequences():
    log_probs_RT = -jnp.arange(1.0, 9).reshape(2, 4)
    is_answer_RT = jnp.asarray([[0, 1, 1, 0], [0, 0, 1, 1]], bool)
    mesh = jshard.make_mesh(context=2, devices=jax.devices()[:2])

    def local(log_probs_RT, is_answer_RT):
        with split_sequences():
            return sum_of_answers(log_probs_RT, is_answer_RT)

    parts, whole = PartitionSpec(None, "context"), PartitionSpec()
    run = jax.shard_map(
        local, mesh=mesh, in_specs=parts, out_specs=whole, check_vma=False
    )
    sums, lengths = jax.jit(run)(log_probs_RT, is_answer_RT)
    np.testing.assert_array_equal(sums, [-5, -15])
    np.testing.assert_array_equal(lengths, [2, 2])


# The recipe's loss on meshes.

MODEL = LlamaConfig(
    vocab_size=64,
    sequence_length=8,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    width=16,
    hidden=24,
    loss_chunk=16,
    attention="blockwise",  # the others have their softmax in float32
    param_dtype=jnp.float64,
)
T, PAIRS = 8, 24


class Small(nnx.Module):
    """A decoder that looks at one token, and is little to compile."""

    splits_sequences = True

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        del config
        options: Any = {"param_dtype": jnp.float64, "rngs": rngs}
        table = nnx.Embed(MODEL.vocab_size, 16, embedding_init=waves, **options)
        self.embed = jshard.Unit(table)
        self.linear = nnx.Linear(16, 16, kernel_init=waves, **options)
        options |= {"use_bias": False, "kernel_init": waves}
        self.head = jshard.Unit(nnx.Linear(16, MODEL.vocab_size, **options))

    def features(self, tokens_BT: jax.Array) -> jax.Array:
        x_BTD = self.embed(tokens_BT)
        return x_BTD + jnp.tanh(self.linear(x_BTD))

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        return self.head(self.features(tokens_BT))

    def log_probs(
        self, tokens_BT: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array
    ) -> tuple:
        del weights_BT  # of routers
        head_DV = jshard.gathered(self.head).kernel.get_value()
        x_BTD = self.features(tokens_BT)
        return jshard.nn.token_log_probs(x_BTD, head_DV, targets_BT, chunk=16), None


def waves(key: Any, shape: tuple[int, int], dtype: Any) -> jax.Array:
    """Initial values that compile in no time."""
    del key
    return jax.device_put(
        np.asarray(np.sin(np.arange(shape[0] * shape[1]) ** 2).reshape(shape), dtype)
    )


MODELS: dict[str, Any] = {"small": Small, "llama": Llama}


def base_of(name: str) -> Any:
    return filled(lambda: MODELS[name](MODEL, rngs=nnx.Rngs(0)))


def make(name: str, objective: preference.Objective, rngs: nnx.Rngs) -> Any:
    model: Any = base_of(name)
    jshard.nn.add_lora(model, rank=2, alpha=8.0, param_dtype=jnp.float64, rngs=rngs)
    linear: Any
    for _, linear in nnx.iter_modules(model):
        if hasattr(linear, "lora_b"):  # so that the reference is another
            shape = linear.lora_b.get_value().shape
            values = 0.1 * np.random.default_rng(1).normal(size=shape)
            linear.lora_b.set_value(jax.device_put(values))
    model.objective = objective
    return model


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, MODEL.vocab_size, (PAIRS, T + 1, 2))
    stops = rng.integers(4, T + 1, (PAIRS, 1, 2))
    places = np.arange(T)[:, None]
    found = {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "texts": places < stops,
        "answers": (places < stops) & (places >= 3),
    }
    return {name: x.reshape(PAIRS, 2 * T) for name, x in found.items()}


def plain_loss(objective: preference.Objective, model: Any, base: Any) -> jax.Array:
    """The same by all logits of two models, written without jshard's losses."""
    rows = {
        name: jnp.concatenate([x.reshape(PAIRS, T, 2)[..., i] for i in range(2)])
        for name, x in batch().items()
    }

    def log_probs(model):
        logits = jax.nn.log_softmax(model(rows["inputs"]))
        return jnp.take_along_axis(logits, rows["targets"][..., None], -1)[..., 0]

    def sums(model):
        return jnp.sum(log_probs(model) * rows["answers"], 1).reshape(2, PAIRS)

    if objective.loss == "dpo":
        chosen, rejected = objective.beta * (sums(model) - sums(base))
        return jnp.mean(jnp.log1p(jnp.exp(rejected - chosen)))
    lengths = jnp.sum(rows["answers"], 1).reshape(2, PAIRS)
    p = jnp.exp(sums(model) / lengths)
    chosen, rejected = p / (1 - p)
    weights = rows["texts"][:PAIRS]
    texts = -jnp.sum(log_probs(model)[:PAIRS] * weights) / jnp.sum(weights)
    return texts + objective.beta * jnp.mean(jnp.log1p(rejected / chosen))


@functools.cache
def plain_step(name: str, objective: preference.Objective) -> tuple[jax.Array, Any]:
    """The loss, and the adapters after a step of gradient descent."""
    model = make(name, objective, nnx.Rngs(0))
    base = base_of(name)
    graphdef, params, rest = nnx.split(model, nnx.LoRAParam, ...)

    @jax.jit
    @jax.value_and_grad
    def loss_of(params: Any) -> jax.Array:
        return plain_loss(objective, nnx.merge(graphdef, params, rest), base)

    loss, grads = loss_of(params)
    return loss, jax.tree.map(lambda p, g: p - np.asarray(g), params, grads)


SHAPES: dict[str, Callable[[], Any]] = {
    **{
        str(n): lambda n=n: jshard.make_mesh(devices=jax.devices()[:n])
        for n in (1, 2, 3, 4, 6, 8)
    },
    "context": lambda: jshard.make_mesh(replica=2, context=2),
    "tensor": lambda: jshard.make_mesh(tensor=2),
    "replica": lambda: jshard.make_mesh(replica=2),
}


@pytest.mark.slow  # above, the formulas
@pytest.mark.parametrize("loss", ["dpo", "orpo"])
@pytest.mark.parametrize("name", MODELS)
def test_the_recipes_losses_without_a_mesh_are_their_formulas(x64, name, loss):
    objective = preference.Objective(loss, 0.5, 0.0, False)

    @nnx.jit
    def both(model, base, rows):
        got = as_loss(preference.loss_fn(model, rows)[0]).compute()
        return got, plain_loss(objective, model, base)

    model = make(name, objective, nnx.Rngs(0))
    got, want = both(model, base_of(name), batch())
    assert error(got, want) <= 1e-9


@pytest.mark.quick("small")
@pytest.mark.parametrize(
    ("name", "loss", "shape", "accumulate"),
    [
        ("small", "dpo", "context", 1),
        *itertools.product(["llama"], ["dpo", "orpo"], SHAPES, [1, 3]),
    ],
)
def test_a_step_on_a_mesh_follows_a_plain_one(x64, name, loss, shape, accumulate):
    objective = preference.Objective(loss, 0.5, 0.0, False)
    want_loss, want = plain_step(name, objective)
    mesh = SHAPES[shape]()
    groups = mesh.size // (2 if shape in ("context", "tensor") else 1)
    if PAIRS % (groups * accumulate):
        accumulate = 1
    policy = jshard.Policy(accumulate=accumulate, min_shard_elements=0)
    fsdp = jshard.FSDP(mesh, policy, sequences=preference.sequences(None))
    optimizer = optax.sgd(1.0)
    model = make(name, objective, nnx.Rngs(0))
    state = fsdp.from_model(model, optimizer, wrt=nnx.LoRAParam)
    step = fsdp.train_step(preference.loss_fn, optimizer)
    state, metrics = step(state, fsdp.shard_batch(batch()))
    assert error(metrics["loss"], want_loss) <= 1e-9
    got, want = map(by_path, (fsdp.fetch(state.params), want))
    assert max(error(got[path], want[path]) for path in want) <= 1e-9
