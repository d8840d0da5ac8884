"""The same Llama or GPT trained as MaxText trains it: annotations, and GSPMD decides.

Nothing of jshard's step is used. The model's own modules run as plain Flax code under
``jit``; parameters are sharded as MaxText's rules say for its "fsdp" axis (the
embedding dimension of each weight), activations over the batch; layers are scanned with
``jax.checkpoint`` around each. Attention and cross-entropy are those that jshard's step
is given (MaxText makes the logits of the whole batch), so that the difference is that
of the sharding.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jshard
from gspmd_experts import expert_spec
from gspmd_float8 import overwritten
from jshard.models.llama import Stream
from jshard.sharding.settings.mesh import EXPERT, FSDP, REPLICA

# XLA_FLAGS of MaxText's published Llama-2-7B run on 8 and 64 H100s, less the dump:
# github.com/AI-Hypercomputer/maxtext, MaxText/configs/a3/llama_2_7b/8vm.sh at
# 00f69819e90416e480f2eaefb9f0f90df10862f7 (1vm.sh has 134217728 for all-reduces).
MAXTEXT_OPTIONS: dict[str, Any] = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_graph_level": 0,
    "xla_gpu_enable_highest_priority_async_stream": True,
    "xla_gpu_all_reduce_combine_threshold_bytes": 1073741824,
    "xla_gpu_all_gather_combine_threshold_bytes": 134217728,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 67108864,
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
    "xla_gpu_enable_pipelined_all_reduce": True,
    "xla_gpu_enable_while_loop_double_buffering": True,
    "xla_gpu_enable_all_gather_combine_by_dim": False,
    "xla_gpu_enable_reduce_scatter_combine_by_dim": False,
    "xla_disable_hlo_passes": "rematerialization",
}

# Those that NVIDIA's JAX-Toolbox publishes for AXLearn combine up to 1 GiB instead:
# github.com/NVIDIA/JAX-Toolbox, .github/container/test-fuji-1B.sh.
AXLEARN_OPTIONS: dict[str, Any] = MAXTEXT_OPTIONS | {
    "xla_gpu_all_gather_combine_threshold_bytes": 1073741824,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 1073741824,
}

# A gather and a scatter under way together.
_OVERLAP = {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}

# What a GSPMD step is compiled with; its row in a table is the fastest of these.
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "maxtext": MAXTEXT_OPTIONS,
    "maxtext, overlap 2": MAXTEXT_OPTIONS | _OVERLAP,
    "axlearn": AXLEARN_OPTIONS,
    "axlearn, overlap 2": AXLEARN_OPTIONS | _OVERLAP,
}

# Those that a step without a loop over layers is compiled with, too (MaxText's
# scan_layers=False, as in the 7B run that NVIDIA publishes with its MaxText container).
ALSO_UNROLLED = ("maxtext", "axlearn, overlap 2")

# MaxText's policies that keep what jshard's of another name do.
ALIKE = {"dots": "minimal_flash"}

# Weights that end in the embedding dimension; the others (but norms) begin with it.
_EMBED_LAST = ("embed", "out", "down")


def param_sharding(
    mesh: Mesh, rules: str, path: tuple[Any, ...], param: Any
) -> NamedSharding:
    """Of a weight; norms are replicated.

    "maxtext" is MaxText's rule, ("embed", "fsdp"); "first" shards the first dimension.
    """
    names = [str(part) for part in path]
    stacked = names[0] == "blocks"
    if param.ndim - stacked < 2:
        return NamedSharding(mesh, PartitionSpec())
    if param.ndim - stacked == 3:
        return NamedSharding(mesh, expert_spec(names))
    last = rules == "maxtext" and any(name in _EMBED_LAST for name in names)
    dim = param.ndim - 1 if last else int(stacked)
    over = (FSDP, EXPERT) if EXPERT in mesh.shape else FSDP
    return NamedSharding(mesh, PartitionSpec(*[None] * dim, over))


def batch_spec(mesh: Mesh) -> PartitionSpec:
    """Of examples: split over all axes."""
    expert = (EXPERT,) if EXPERT in mesh.shape else ()
    return PartitionSpec((REPLICA, FSDP, *expert))


def abstract_state(
    make_model: Any, optimizer: Any, mesh: Mesh, rules: str = "maxtext"
) -> tuple[Any, Any]:
    """((params, optimizer state) as abstract arrays, graph definition)."""
    model = nnx.eval_shape(lambda: make_model(nnx.Rngs(0)))
    graphdef, params = nnx.split(model, nnx.Param)
    shardings = {
        path: param_sharding(mesh, rules, path, variable.get_value())
        for path, variable in nnx.to_flat_state(params)
    }

    def shard(path, variable):
        x = variable.get_value()
        sharding = shardings[path]
        return variable.copy(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding))

    params = nnx.map_state(shard, params)
    opt_state = jax.eval_shape(optimizer.init, params)
    opt_state = optax.tree_map_params(
        optimizer,
        lambda x, p: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=p.sharding),
        opt_state,
        params,
        transform_non_params=lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec())
        ),
    )
    return (params, opt_state), graphdef


def checkpointed(fn: Any, remat: str, scan: bool = True) -> Any:
    """MaxText's remat policies around one layer, by MaxText's names or jshard's.

    MaxText saves activations by name. Here the same ones are found by the primitive
    that makes them: products with a weight, by their shape, and cuDNN's attention.
    """
    policies = jax.checkpoint_policies
    if remat == "none":
        return fn
    products = policies.dots_with_no_batch_dims_saveable
    policy = {
        "full": policies.nothing_saveable,
        "dots": products,
        "minimal_flash": policies.save_from_both_policies(products, _is_attention),
        "save_dot_except_mlpwi": lambda *args, **params: (
            products(*args, **params) and not _widens(*args)
        ),
        "save_dot_with_context_except_mlp": lambda *args, **params: (
            (products(*args, **params) and not _widens(*args))
            or _is_attention(*args, **params)
        ),
        "save_dot_except_mlp": policies.save_from_both_policies(
            policies.save_only_these_names("qkv"), _is_square
        ),
        "save_qkv_proj": policies.save_only_these_names("qkv"),
        "save_dot": policies.save_from_both_policies(
            policies.save_only_these_names("qkv", "hidden", "down"), _is_square
        ),
    }[remat]
    # Where layers are written out XLA would find a recomputation equal to its original.
    return jax.checkpoint(fn, policy=policy, prevent_cse=not scan)


def _is_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether a primitive is the forward of cuDNN's attention ("context")."""
    return primitive.name.startswith("dot_product_attention_fwd")


def _widens(primitive: Any, *operands: Any) -> bool:
    """Whether a product is the MLP's gate or up projection, whose output is wider."""
    del primitive
    size_in, size_out = operands[1].shape
    return size_out > size_in


def _is_square(primitive: Any, *operands: Any, **__: Any) -> bool:
    """Whether a product has as many outputs as inputs, as attention's output has."""
    if primitive.name != "dot_general" or operands[1].ndim != 2:
        return False
    size_in, size_out = operands[1].shape
    return size_out == size_in


@dataclasses.dataclass(frozen=True)
class Form:
    """How a step is written, apart from its sharding.

    Attributes:
      remat: MaxText's policy around a layer.
      scan: whether layers are a loop, or each is written out.
      iota: whether tokens are embedded by a product with their one-hot vectors, as
        with MaxText's ``use_iota_embed``, or looked up.
      chunk: tokens whose logits exist at a time; None is all, as in MaxText.
    """

    remat: str
    scan: bool = True
    iota: bool = False
    chunk: int | None = None


def loss(model: Any, batch: Any, mesh: Mesh, form: Form) -> jax.Array:
    """The mean cross-entropy, over the tokens that count.

    Args:
      model: a Llama, or a GPT without dropout.
      batch: "inputs", "targets" and "weights".
      mesh: what the batch is split over.
      form: how the step is written.
    """
    constrain = functools.partial(
        lax.with_sharding_constraint, shardings=NamedSharding(mesh, batch_spec(mesh))
    )
    layers, stacked = nnx.split(model.blocks)
    # By what it has: a recipe's Llama is not this module's, it imports its own.
    is_gpt = hasattr(model, "positions")

    def layer(x_BTD, params):
        block = nnx.merge(layers, params, copy=True)
        object.__setattr__(block, "__class__", type(model.blocks).plain_class)
        if is_gpt:
            return constrain(block(x_BTD)), None
        return constrain(block(Stream(x_BTD)).x_BTD), None

    if form.iota:
        embedding_VD = model.embed.embedding.get_value().astype(model.embed.dtype)
        size, dtype = embedding_VD.shape[0], embedding_VD.dtype
        x_BTD = constrain(jax.nn.one_hot(batch["inputs"], size, dtype=dtype))
        x_BTD = x_BTD @ embedding_VD
    else:
        x_BTD = model.embed(batch["inputs"])
    if is_gpt:
        x_BTD = x_BTD + model.positions(jnp.arange(x_BTD.shape[1]))
    x_BTD, _ = lax.scan(
        checkpointed(layer, form.remat, form.scan),
        constrain(x_BTD),
        stacked,
        unroll=1 if form.scan else True,
    )
    x_BTD = model.norm(x_BTD)
    if hasattr(model, "head"):
        head_DV = model.head.kernel.get_value()
    else:  # tied
        head_DV = model.embed.embedding.get_value().T
    # All tokens are one chunk: the first dimension stays split over the devices, and a
    # device has the logits of its own tokens, as many as in jshard's chunk.
    mean = jshard.nn.cross_entropy(
        x_BTD,
        head_DV,
        batch["targets"],
        batch["weights"],
        chunk=form.chunk or batch["targets"].size,
    )
    return mean.compute()


def train_step(
    graphdef: Any,
    optimizer: Any,
    mesh: Mesh,
    form: Form,
    state: Any,
    accumulate: int = 1,
) -> Any:
    """The jitted ``state, loss = step(state, batch)``; the state is donated."""

    def step(state, batch):
        params, opt_state = state

        def of_params(params, batch):
            model = nnx.merge(graphdef, params, copy=True)
            return loss(model, batch, mesh, form)

        differentiate = jax.value_and_grad(of_params)
        if accumulate > 1:
            differentiate = accumulated(differentiate, mesh, accumulate)
        value, grads = differentiate(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        updated = optax.apply_updates(params, updates)
        return (overwritten(params, grads, updated), opt_state), value

    shardings = jax.tree.map(lambda x: x.sharding, state)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


def accumulated(differentiate: Callable, mesh: Mesh, accumulate: int) -> Callable:
    """Means over micro-batches of equal weight, one after another; sums in float32."""
    sharding = NamedSharding(mesh, PartitionSpec(None, *batch_spec(mesh)))

    def split(x):
        x = x.reshape(accumulate, -1, *x.shape[1:])
        return lax.with_sharding_constraint(x, sharding)

    def of_batch(params, batch):
        def add(sums, micro_batch):
            return jax.tree.map(jnp.add, sums, differentiate(params, micro_batch)), None

        zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), params))
        sums, _ = lax.scan(add, zeros, jax.tree.map(split, batch))
        return jax.tree.map(lambda x: x / accumulate, sums)

    return of_batch
