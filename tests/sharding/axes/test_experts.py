"""Experts split over devices, against all of them on one device, in float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import hlo
from filled import filled
from jshard.models.llama_config import LlamaConfig
from jshard.models.moe import MixtureOfExperts
from jshard.plan.start_up import equations, traffic
from jshard.sharding.axes import experts
from jshard.sharding.axes.experts import capacities
from jshard.sharding.cpu.order import in_order
from parity import every_pair

E, K, D, F, BATCH, TIME = 8, 2, 6, 10, 8, 20
AXES = ("replica", "fsdp", "expert")
CHOICES = BATCH * TIME * K // 8  # of each of eight devices


@functools.cache
def mixture(capacity: float = 1.25) -> tuple[Any, Any]:
    config = LlamaConfig(
        width=D,
        hidden=F,
        num_heads=1,
        num_kv_heads=1,
        num_experts=E,
        experts_per_token=K,
        expert_capacity=capacity,
        dtype=jnp.float64,
        param_dtype=jnp.float64,
    )
    return nnx.split(filled(lambda: MixtureOfExperts(config, rngs=nnx.Rngs(0))))


def skewed(params: Any, skew: str) -> Any:
    """Routes some tokens, or all, to the same experts."""
    kernel = params["router"]["kernel"].get_value()
    push = {"even": 0.0, "skewed": 1.0, "all to two": 100.0}[skew]
    kernel = np.array(kernel)
    kernel[0] = push * np.array([1, 1, 0, 0, 0, 0, 0, 0.0])
    params["router"]["kernel"].set_value(jax.device_put(kernel))
    return params


def tokens() -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    x_BTD = rng.standard_normal((BATCH, TIME, D))
    x_BTD[..., 0] = 1.0  # what ``skewed`` looks at
    return jax.device_put(x_BTD), jax.device_put(rng.standard_normal(x_BTD.shape))


def objective(graphdef: Any, remat: Any, params: Any, x_BTD: Any, out_BTD: Any) -> Any:
    def layer(params: Any, x_BTD: Any) -> Any:
        y_BTD, load = nnx.merge(graphdef, params)(x_BTD)
        return y_BTD + x_BTD, load

    if remat != "none":
        policies = jax.checkpoint_policies
        policy = {
            "full": policies.nothing_saveable,
            "dots": policies.dots_with_no_batch_dims_saveable,
            "names": policies.save_only_these_names("hidden"),
        }[remat]
        layer = jax.checkpoint(layer, policy=policy)
    y_BTD, load = layer(params, x_BTD)
    return jnp.sum(y_BTD * out_BTD), (y_BTD, load.tokens_E)


def on_mesh(shape: tuple[int, ...], capacity: float, remat: str, params: Any) -> Any:
    """(function, arguments): value and gradients with the experts split."""
    graphdef, _ = mixture(capacity)
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    mesh = Mesh(devices, AXES)
    specs = jax.tree.map(lambda x: P("expert") if x.ndim == 3 else P(), params)
    batch = P(AXES)

    def step(number: Any, params: Any, x_BTD: Any, out_BTD: Any) -> Any:
        def local(params: Any, x_BTD: Any) -> Any:
            return objective(graphdef, remat, params, x_BTD, out_BTD)

        (total, (y_BTD, tokens_E)), (of_params, of_x) = jax.value_and_grad(
            local, argnums=(0, 1), has_aux=True
        )(params, x_BTD)
        # Each device's own: of experts that are split, over the others alone.
        of_params = jax.tree.map(
            lambda g, spec: jax.lax.psum(g, [a for a in AXES if a not in spec]),
            of_params,
            specs,
        )
        grads = of_params, of_x
        return (
            jax.lax.psum(total, AXES),
            y_BTD,
            jax.lax.psum(tokens_E, AXES),
            grads,
        )

    run = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P(), specs, batch, batch),
        out_specs=(P(), batch, P(), (specs, batch)),
        check_vma=False,
    )
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    x_BTD, out_BTD = (place(x, batch) for x in tokens())
    params = jax.tree.map(place, params, specs)
    return jax.jit(in_order(run)), (jnp.int32(0), params, x_BTD, out_BTD)


@functools.cache
def on_one_device(skew: str) -> Any:
    graphdef, params = mixture()
    params = skewed(jax.tree.map(jnp.asarray, params), skew)
    value_and_grad = jax.value_and_grad(
        functools.partial(objective, graphdef, "none"), argnums=(0, 1), has_aux=True
    )
    (value, (y_BTD, chosen_E)), grads = jax.jit(value_and_grad)(params, *tokens())
    return params, (value, y_BTD, chosen_E, grads)


@pytest.mark.usefixtures("x64")
@pytest.mark.quick("full-0.1-alltotwo-2")
@every_pair(
    remat=("none", "full", "dots", "names"),
    capacity=(0.1, 1.25, 4.0),
    skew=("even", "skewed", "all to two"),
    devices=(1, 2, 4, 8),
)
def test_split_experts_are_those_of_one_device(case):
    remat, capacity, skew, devices = case.values()
    params, want = on_one_device(skew)
    shape = {1: (2, 4, 1), 2: (2, 2, 2), 4: (1, 2, 4), 8: (1, 1, 8)}[devices]
    run, arguments = on_mesh(shape, capacity, remat, params)
    got = run(*arguments)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


def all_to_alls(shape: tuple[int, ...], capacity: float, remat: str) -> Any:
    run, arguments = on_mesh(shape, capacity, remat, on_one_device("even")[0])
    return run.trace(*arguments).jaxpr.jaxpr, dict(zip(AXES, shape, strict=True))


@pytest.mark.quick("none-2")
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("remat", "passes"), [("none", 2), ("full", 3)])
def test_tokens_go_to_experts_each_pass_and_results_return_once(remat, passes):
    jaxpr, sizes = all_to_alls((1, 2, 4), 1.25, remat)
    rows, _ = capacities(CHOICES, E, 1.25)
    found = traffic(jaxpr, sizes)["all-to-all", "float64"]
    assert rows == 8  # 6.25 rounded up
    assert found.count == 2 * passes + 2  # with weights
    leaving = E // 4 * 3 * rows  # for the experts of the three other devices
    # Rows of D numbers and a weight; results and their gradients have no weight.
    assert found.wire_bytes == leaving * ((passes + 2) * D + passes) * 8
    # Each loop of further rounds has those of its own rounds, and is not counted.
    loops = [eqn for eqn, _ in equations(jaxpr) if eqn.primitive.name == "while"]
    assert len(loops) == 2  # in the forward, and in the backward


@pytest.mark.usefixtures("x64")
def test_a_first_round_with_room_for_all_needs_no_others():
    jaxpr, _ = all_to_alls((1, 2, 4), 8.0, "none")
    assert not any(eqn.primitive.name == "while" for eqn, _ in equations(jaxpr))


@pytest.mark.slow  # above, the exchanges of a program
@pytest.mark.usefixtures("x64")
def test_a_compiled_exchange_has_the_traffic_of_its_first_round():
    run, arguments = on_mesh((1, 2, 4), 1.25, "none", on_one_device("even")[0])
    text = hlo.compile(run.lower(*arguments)).as_text()
    found = [x for x in hlo.collectives(text) if x.kind == "all-to-all" and x.times]
    assert sum(x.times for x in found if "f64" in str(x.operands)) == 6


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_uneven_rounds_never_hang_and_never_differ():
    params, _ = on_one_device("skewed")
    run, (*arguments, x_BTD, out_BTD) = on_mesh((2, 2, 2), 0.1, "full", params)
    # Only half of the groups that exchange tokens have skewed ones, and more rounds.
    x_BTD = jax.device_put(x_BTD.at[BATCH // 2 :, :, 0].set(0), x_BTD.sharding)
    arguments += [x_BTD, out_BTD]
    first = run(*arguments)
    for _ in range(300):
        again = run(*arguments)
        jax.tree.map(np.testing.assert_array_equal, again, first)


@pytest.mark.parametrize(
    ("choices", "experts", "capacity", "rows"),
    [
        (4096, 8, 1.25, (640, 256)),
        (100, 4, 1.25, (32, 16)),
        (4096, 8, 0.01, (8, 256)),
        (64, 4, 9.0, (64, 8)),
        (6, 2, 1.25, (6, 6)),
    ],
)
def test_rounds_have_room_for_shares_in_multiples_of_eight(
    choices, experts, capacity, rows
):
    assert capacities(choices, experts, capacity) == rows


@pytest.mark.usefixtures("x64")
@pytest.mark.quick("all to two-full")
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("skew", ["even", "all to two"])
def test_rounds_with_whole_experts_are_grouped_products(skew, remat, monkeypatch):
    params, want = on_one_device(skew)
    monkeypatch.setattr(experts, "on_gpus", lambda: True)  # where these are slow
    run, arguments = on_mesh((2, 4, 1), 1.25, remat, params)
    jaxpr = run.trace(*arguments).jaxpr.jaxpr
    names = {eqn.primitive.name for eqn, _ in equations(jaxpr)}
    assert "while" in names
    assert not names & {"ragged_dot_general", "all_to_all"}
    for a, b in zip(*map(jax.tree.leaves, (run(*arguments), want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


def test_the_gradient_of_rows_is_rows_by_the_inverse_indices():
    """Zeros to scatter into would be made for all unrolled layers at once."""
    rng = np.random.default_rng(0)
    size = (3, 4)  # for 3 experts 4 rows each, of which some are padding; of 8 choices
    slots = rng.permutation(12)[:7]
    slot = jnp.asarray([*slots, 12 + 7])  # the last choice is of another round
    choice = np.full(12, 8) + np.arange(12)
    choice[slots] = np.arange(7)
    choice = jnp.asarray(choice.reshape(size))
    x, out = (jnp.asarray(rng.normal(size=s)) for s in ((8, 5), (*size, 5)))

    def loss(x: Any, rows: Any) -> Any:
        there = rows(x, choice, slot)
        back = rows((there * out).reshape(12, 5), slot, choice)
        return jnp.sum(jnp.sin(back) * x)

    plain = lambda x, index, _: x.at[index].get(mode="fill", fill_value=0)
    got = jax.grad(lambda x: loss(x, experts._rows))
    want = jax.grad(lambda x: loss(x, plain))
    np.testing.assert_array_equal(got(x), want(x))
    names = lambda fn: {
        eqn.primitive.name for eqn, _ in equations(jax.make_jaxpr(fn)(x).jaxpr)
    }
    assert "scatter-add" in names(want)
    assert "scatter-add" not in names(got)


def test_many_rounds_add_up_in_float32(monkeypatch):
    """The gradients of 512 rounds, of which each adds as much to an expert's kernel."""
    monkeypatch.setattr(experts, "on_gpus", lambda: True)
    N, E, D = 4096, 512, 2
    kernel_EDD = jnp.ones((E, D, D), jnp.bfloat16)

    def total(kernel_EDD: Any) -> Any:
        apply = lambda kernel, x_EMD, _, weight_EM: (
            jnp.matmul(x_EMD, kernel["of"].get_value()) * weight_EM[..., None]
        )
        modules = nnx.Dict(of=nnx.Param(kernel_EDD))
        x_ND = jnp.ones((N, D), jnp.bfloat16)
        expert_N1 = jnp.zeros((N, 1), jnp.int32)
        weight_N1 = jnp.ones((N, 1))
        y_ND = experts.on_experts(apply, modules, x_ND, expert_N1, weight_N1, E, 0.01)
        return jnp.sum(y_ND.astype(jnp.float32))

    got_EDD = jax.jit(jax.grad(total))(kernel_EDD)
    assert got_EDD.dtype == jnp.bfloat16
    np.testing.assert_allclose(got_EDD[0].astype(jnp.float32), N, rtol=2**-8)
