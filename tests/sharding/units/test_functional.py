"""The functional core on plain pytrees, inside a user's own shard_map."""

import functools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import jshard
from jshard.functional import gather, scan_layers
from jshard.sharding.layout.specs import shard_dim

LAYERS, WIDTH, EXAMPLES = 4, 16, 16
AXES = ("replica", "fsdp")


@pytest.fixture
def problem(x64):
    """Stacked parameters, an argument that all layers share, and a batch."""
    rng = np.random.default_rng(0)
    params = {
        "w": rng.normal(size=(LAYERS, WIDTH, WIDTH)) / 4,
        "v": rng.normal(size=(LAYERS, WIDTH, 3)) / 4,
        "b": rng.normal(size=(LAYERS, 5)),
    }
    scale, x = rng.uniform(1, 2, size=WIDTH), rng.normal(size=(EXAMPLES, WIDTH))
    return jax.tree.map(jnp.asarray, (params, scale, x))


SPECS = {"w": P(None, None, "fsdp"), "v": P(None, "fsdp"), "b": P()}


def layer(p: Any, x: jax.Array, scale: jax.Array) -> tuple[jax.Array, Any]:
    h = checkpoint_name(x @ (p["w"] * scale), "hidden")
    return jnp.tanh(h) + jnp.sum(p["b"]), {"v": jnp.sin(h @ p["v"]), "n": jnp.int32(1)}


def loss(out: tuple[jax.Array, Any]) -> jax.Array:
    y, aux = out
    return jnp.sum(y**2) + jnp.sum(aux["v"] ** 3)


def plain(params: Any, scale: jax.Array, x: jax.Array) -> jax.Array:
    return loss(jax.lax.scan(lambda x, p: layer(p, x, scale), x, params))


def sharded(mesh: jax.sharding.Mesh, apply: Any, specs: Any = SPECS) -> Any:
    """``value_and_grad`` of ``loss(apply(params, scale, x))``, in a shard_map."""

    def local(params, scale, x):
        value, grads = jax.value_and_grad(
            lambda params, scale: loss(apply(params, scale, x)), argnums=(0, 1)
        )(params, scale)
        # What is not gathered has each device's own gradient.
        grads = grads[0], jax.lax.psum(grads[1], AXES)
        return jax.lax.psum(value, AXES), grads

    return jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(specs, P(), P(AXES)),
            out_specs=(P(), (specs, P())),
            check_vma=False,
        )
    )


# Compiled once for all tests.
plain_value_and_grad = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))


def check_close(got: Any, want: Any, bound: float = 1e-9) -> None:
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_allclose(g, w, rtol=0, atol=bound * np.abs(w).max())


@pytest.mark.quick("8-dots-False", "2-none-True")
@pytest.mark.parametrize(
    ("replica", "remat", "reshard"),
    [
        (1, "full", True),
        (1, "none", False),
        (2, "dots", True),
        pytest.param(2, "none", True, marks=pytest.mark.core),
        (2, "full", False),
        (8, "dots", False),
        (2, jshard.Names("hidden"), True),
        (1, jax.checkpoint_policies.everything_saveable, True),
    ],
)
def test_scan_layers_has_values_and_gradients_of_a_plain_scan(
    problem, replica, remat, reshard
):
    apply = functools.partial(
        jshard.functional.scan_layers,
        layer,
        specs=SPECS,
        remat=remat,
        reshard_after_forward=reshard,
    )
    params, scale, x = problem
    step = sharded(
        jshard.make_mesh(replica=replica), lambda p, scale, x: apply(p, x, scale)
    )
    want = plain_value_and_grad(params, scale, x)
    check_close(step(params, scale, x), want)


def test_scan_layers_differentiates_values_that_the_layer_closes_over(problem):
    def apply(params, scale, x):
        varied = scale * (1 + 0 * jnp.sum(x))  # one differs by device, one does not
        return scan_layers(
            lambda p, x: layer(p, x, (scale + varied) / 2), params, x, specs=SPECS
        )

    params, scale, x = problem
    want = plain_value_and_grad(params, scale, x)
    check_close(sharded(jshard.make_mesh(replica=2), apply)(*problem), want)


@pytest.mark.quick("2")
@pytest.mark.parametrize("replica", [1, 2, 8])
def test_gather_has_values_and_gradients_of_the_full_parameters(problem, replica):
    def apply(params, scale, x):
        full = gather(params, SPECS)
        return jax.lax.scan(lambda x, p: layer(p, x, scale), x, full)

    params, scale, x = problem
    want = plain_value_and_grad(params, scale, x)
    check_close(sharded(jshard.make_mesh(replica=replica), apply)(*problem), want)


def test_scan_layers_takes_a_pytree_carry_with_integers(problem):
    def count(p, state, scale):
        return {"x": layer(p, state["x"], scale)[0], "n": state["n"] + 1}

    def apply(params, scale, x):
        carry = {"x": x, "n": jnp.int32(0)}
        out = scan_layers(count, params, carry, scale, specs=SPECS, remat="none")
        return out["x"] * out["n"], {"v": jnp.zeros(1)}

    def plain_apply(params, scale, x):
        for i in range(LAYERS):
            x = layer(jax.tree.map(lambda p, i=i: p[i], params), x, scale)[0]
        return loss((x * LAYERS, {"v": jnp.zeros(1)}))

    want = jax.jit(jax.value_and_grad(plain_apply, argnums=(0, 1)))(*problem)
    check_close(sharded(jshard.make_mesh(replica=2), apply)(*problem), want)


@pytest.mark.quick("scan_layers")
@pytest.mark.parametrize("functional", ["gather", "scan_layers"])
def test_low_precision_gathers_can_reduce_in_full_precision(problem, functional):
    """The wire carries bf16 out and fp32 back, and the sum is an fp32 sum."""
    params, scale, x = jax.tree.map(lambda v: v.astype(jnp.float32), problem)
    dtypes = {"dtype": jnp.bfloat16, "reduce_dtype": jnp.float32}

    def apply(params, scale, x):
        x = x.astype(jnp.bfloat16)
        scale = scale.astype(jnp.bfloat16)
        if functional == "scan_layers":
            return scan_layers(layer, params, x, scale, specs=SPECS, **dtypes)
        full = gather(params, SPECS, **dtypes)
        return jax.lax.scan(lambda x, p: layer(p, x, scale), x, full)

    step = sharded(jshard.make_mesh(), apply)
    text = str(step.trace(params, scale, x).jaxpr)
    gathers = [line for line in text.splitlines() if "all_gather[" in line]
    scatters = [line for line in text.splitlines() if "reduce_scatter[" in line]
    assert gathers
    assert all("bf16[" in line for line in gathers)
    assert scatters
    assert all("f32[" in line for line in scatters)
    value, (grads, _) = step(params, scale, x)
    want, (want_grads, _) = plain_value_and_grad(*problem)
    assert grads["w"].dtype == jnp.float32
    np.testing.assert_allclose(value, want, rtol=0.03)
    grads = jax.tree.map(lambda g: g.astype(jnp.float64), grads)
    check_close(grads, want_grads, bound=0.05)


def test_scan_layers_rejects_a_layer_that_changes_its_carry(problem):
    def grow(p, x):
        return jnp.concatenate([x, x @ p["w"]], axis=1)

    apply = lambda p, scale, x: (
        scan_layers(grow, p, x, specs=SPECS),
        {"v": scale},
    )
    with pytest.raises(
        jshard.UserError, match="equal layers must keep shape and dtype"
    ):
        sharded(jshard.make_mesh(), apply)(*problem)


def test_scan_layers_rejects_an_unknown_remat_policy(problem):
    params, scale, x = problem
    with pytest.raises(jshard.UserError, match="'most' is not one of full, attention"):
        scan_layers(layer, params, x, scale, specs=SPECS, remat="most")


shapes = st.lists(st.integers(0, 12), max_size=4).map(tuple)


@hypothesis.given(shapes, st.integers(1, 8), st.integers(0, 4), st.integers(0, 64))
def test_shard_dim_is_the_first_divisible_dimension_after_the_layers(
    shape, shards, layer_dims, min_elements
):
    layer_dims = min(layer_dims, len(shape))
    dim = shard_dim(shape, shards, layer_dims=layer_dims, min_elements=min_elements)
    own = shape[layer_dims:]
    divisible = [i for i, size in enumerate(own) if size and size % shards == 0]
    if dim is None:
        assert not divisible or np.prod(own) < min_elements
    else:
        assert np.prod(own) >= min_elements
        assert layer_dims + divisible[0] == len(shape) + dim


@hypothesis.given(shapes, st.integers(1, 8), st.integers(1, 5))
def test_shard_dim_is_the_same_for_one_layer_and_for_a_stack(shape, shards, layers):
    stacked = shard_dim((layers, *shape), shards, layer_dims=1)
    assert stacked == shard_dim(shape, shards)


@hypothesis.given(shapes, st.integers(2, 8), st.data())
def test_shard_dim_leaves_dimensions_alone_that_another_mesh_axis_has_taken(
    shape, shards, data
):
    axes = st.sampled_from([None, ("tensor",)])
    taken = data.draw(st.lists(axes, max_size=len(shape)))
    free = [1 if any(taken[i : i + 1]) else size for i, size in enumerate(shape)]
    assert shard_dim(shape, shards, taken=taken) == shard_dim(tuple(free), shards)
