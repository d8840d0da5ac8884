"""Plans train steps of other libraries for H100s that are not there.

    python3.12 -m venv foreign   # MaxText needs Python 3.12
    foreign/bin/pip install -e '.[plan]' 'jax==0.11.1'
    foreign/bin/pip install --no-deps maxtext==0.2.5 google-tunix==0.1.7 \
        equinox==0.13.8
    JAX_PLATFORMS=cpu foreign/bin/python benchmarks/foreign_programs.py maxtext

Their other dependencies are large (TensorFlow, PyTorch), and each import names the few
that it needs. The figures are in docs/log/schedules.md.
"""

import collections
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jshard.plan
from jshard.plan.output import plan_page, plan_text
from jshard.plan.planning import Plan

TOPOLOGY = "h100:8"
COLLECTIVE = re.compile(
    r"[\])}] ((?:ragged-)?all-to-all|all-gather|all-reduce|reduce-scatter|"
    r"collective-permute)(?:-start)?\("
)


def maxtext(*words: str) -> Plan:
    """Plans MaxText's train step of Llama 3 8B, as ``train_compile.main`` builds it."""
    import maxtext
    from flax.core.spmd import logical_axis_rules
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train, train_compile
    from maxtext.utils import maxtext_utils, sharding

    base = Path(maxtext.__file__).parent / "configs/base.yml"
    settings = (
        "model_name=llama3-8b hardware=gpu per_device_batch_size=1 "
        "max_target_length=4096 attention=cudnn_flash_jax compile_topology=a3 "
        "compile_topology_num_slices=1"
    )
    config = pyconfig.initialize([sys.argv[0], str(base), *settings.split(), *words])
    devices = jshard.plan.devices(TOPOLOGY)
    sizes = {"data": len(devices) // 8, "fsdp": 8}  # a copy on each host
    grid = np.reshape(devices, [sizes.get(axis, 1) for axis in config.mesh_axes])
    mesh = Mesh(grid, config.mesh_axes)
    arguments, _, places, _, model = train_compile.get_shaped_inputs(mesh, config)
    params, places = sharding.maybe_update_params_sharding_with_opt(config, places)
    batch = sharding.get_input_data_sharding(config, mesh)
    function, given, results, static, donated = (
        maxtext_utils.get_functional_train_with_signature(
            train.train_step, batch, places, model, config, params
        )
    )
    step = jax.jit(
        function,
        in_shardings=given,
        out_shardings=results,
        static_argnums=static,
        donate_argnums=donated,
    )
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        return jshard.plan.plan(step, *arguments, topology=TOPOLOGY)


def tunix() -> Plan:
    """Plans the step of Tunix's trainer, full fine-tuning of Llama 3.2 1B."""
    from flax import nnx
    from tunix.models.llama3.model import Llama3, ModelConfig
    from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

    grid = np.array(jshard.plan.devices(TOPOLOGY)).reshape(4, 2)
    mesh = Mesh(grid, ("fsdp", "tp"))
    trainers = []

    def make() -> Any:
        model = Llama3(ModelConfig.llama3p2_1b(), rngs=nnx.Rngs(0))
        schedule = TrainingConfig(eval_every_n_steps=100)
        trainers.append(PeftTrainer(model, optax.adamw(1e-4), schedule))
        return model, trainers[0].optimizer

    def placed(module: Any) -> Any:
        graph, state = nnx.split(module)
        places = nnx.get_named_sharding(state, mesh)
        return nnx.merge(graph, jax.tree.map(array, state, places))

    def array(x: Any, sharding: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def inputs(batch: Any) -> dict[str, Any]:  # as in Tunix's examples
        examples, length = batch.input_tokens.shape
        causal = jnp.tril(jnp.ones((examples, length, length), bool))
        return {
            "input_tokens": batch.input_tokens,
            "input_mask": batch.input_mask,
            "positions": jnp.broadcast_to(jnp.arange(length), (examples, length)),
            "attention_mask": causal,
        }

    tokens = jax.ShapeDtypeStruct((8, 2048), jnp.int32)
    tokens = array(tokens, NamedSharding(mesh, P("fsdp")))
    batch = TrainingInput(input_tokens=tokens, input_mask=tokens.update(dtype=bool))
    with mesh:  # Tunix's layers look for it
        model, optimizer = nnx.eval_shape(make)
    trainer = trainers[0].with_gen_model_input_fn(inputs)
    trainer.model, trainer.optimizer = placed(model), placed(optimizer)
    step, _ = trainer.jit_train_and_eval_step()  # in a mesh it would move arrays
    with mesh:
        return jshard.plan.plan(step, batch, topology=TOPOLOGY)


def equinox() -> Plan:
    """Plans a step of Equinox's ``filter_jit`` on a transformer of its layers."""
    import equinox as eqx

    optimizer = optax.adamw(1e-3)
    width, heads, words = 1024, 16, 32000

    class Block(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        mlp: eqx.nn.MLP
        norms: list

        def __init__(self, key: Any):
            self.attention = eqx.nn.MultiheadAttention(heads, width, key=key)
            self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=key)
            self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]

        def __call__(self, x: Any) -> Any:
            y = jax.vmap(self.norms[0])(x)
            x = x + self.attention(y, y, y)
            return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))

    class Transformer(eqx.Module):
        embed: eqx.nn.Embedding
        blocks: list
        dropout: eqx.nn.Dropout
        head: eqx.nn.Linear

        def __init__(self, key: Any):
            self.embed = eqx.nn.Embedding(words, width, key=key)
            self.blocks = [Block(key) for key in jax.random.split(key, 6)]
            self.dropout = eqx.nn.Dropout(0.1)
            self.head = eqx.nn.Linear(width, words, key=key)

        def __call__(self, tokens: Any, key: Any) -> Any:
            x = self.dropout(jax.vmap(self.embed)(tokens), key=key)
            for block in self.blocks:
                x = block(x)
            return jax.vmap(self.head)(x)

    def loss(model: Any, tokens: Any, key: Any) -> Any:
        logits = jax.vmap(model)(tokens, jax.random.split(key, len(tokens)))
        return optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1], tokens[:, 1:]
        ).mean()

    @eqx.filter_jit(donate="all")
    def step(model: Any, state: Any, tokens: Any, key: Any) -> Any:
        value, grads = eqx.filter_value_and_grad(loss)(model, tokens, key)
        updates, state = optimizer.update(grads, state, model)
        return eqx.apply_updates(model, updates), state, value

    mesh = Mesh(np.array(jshard.plan.devices(TOPOLOGY)), ("data",))

    def placed(x: Any) -> Any:  # the first axis of at least `width` is divided
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        axis = next((i for i, size in enumerate(x.shape) if size >= width), None)
        spec = P() if axis is None else P(*[None] * axis, "data")
        return x.update(sharding=NamedSharding(mesh, spec))

    key = jax.random.key(0)
    model = eqx.filter_eval_shape(Transformer, key)
    arrays = eqx.filter(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    state = eqx.filter_eval_shape(optimizer.init, arrays)
    tokens = jax.ShapeDtypeStruct((32, 1024), jnp.int32)
    tokens = tokens.update(sharding=NamedSharding(mesh, P("data")))
    model, state = jax.tree.map(placed, (model, state))
    return jshard.plan.plan(step, model, state, tokens, key, topology=TOPOLOGY)


if __name__ == "__main__":
    name, *words = sys.argv[1:]
    plan = {"maxtext": maxtext, "tunix": tunix, "equinox": equinox}[name](*words)
    print("\n".join(plan_text.lines(plan)))
    print("in the text:", dict(collections.Counter(COLLECTIVE.findall(plan.text))))
    Path(f"{name}.html").write_text(plan_page.render(plan))
