"""Weights in 4 bits against bitsandbytes and PEFT, in torch on the CPU."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_transformers import MARKS, V, random_decoder

import jshard
from jshard.models import llama_huggingface as huggingface
from jshard.models.llama import Llama, LlamaConfig
from jshard.sharding.layout.four_bit.codes import FourBit
from jshard.storage.hub.huggingface_folder import read_config
from jshard.storage.hub.parameters import find_parameters, start_from
from torch_training import torch_losses

pytestmark = [
    *MARKS,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

B, T, RANK, ALPHA, STEPS, RATE = 8, 16, 4, 8, 20, 1e-2
ADAMW = optax.adamw(RATE, weight_decay=0.0)
SIZES = {"hidden_size": 64, "intermediate_size": 128}


@pytest.fixture(scope="module")
def functional():
    pytest.importorskip("torch")
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    return bitsandbytes.functional


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["nf4", "fp4", "nf4_single", "fp4_single"])
def test_bytes_and_values_are_those_of_bitsandbytes(functional, kind, dtype):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    shape = (192, 320)
    # In steps of 2**-8, so that the order of additions in the mean does not matter.
    weight = torch.round(torch.randn(shape[::-1]) * 64).to(getattr(torch, dtype)) / 256
    weight[0, :64] = 0
    codes, state = functional.quantize_4bit(
        weight,
        quant_type=kind.removesuffix("_single"),
        compress_statistics=not kind.endswith("_single"),
    )
    want = functional.dequantize_4bit(codes, state).float().numpy()
    parts = [codes, state.absmax]
    parts += [state.state2.absmax, state.offset] if state.nested else []
    data = np.concatenate([x.numpy().reshape(-1).view(np.uint8) for x in parts])

    four_bit = FourBit(kind, shape, dtype)
    ours = jax.jit(four_bit.encode)(jnp.asarray(weight.float().numpy().T, dtype))
    np.testing.assert_array_equal(ours, data)
    decode = jax.jit(lambda x: four_bit.decode(x).astype(jnp.float32))
    np.testing.assert_array_equal(decode(data).T, want)


@pytest.fixture(scope="module")
def folders(functional, tmp_path_factory) -> dict[str, Path]:
    """A tiny Llama, as it is and as transformers saves it in 4 bits."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    names = ("plain", "nf4", "nf4_single", "fp4_single")
    found = {name: tmp_path_factory.mktemp(name) for name in names}
    random_decoder("LlamaConfig", **SIZES).save_pretrained(found["plain"])
    for name in names[1:]:
        config = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=name.removesuffix("_single"),
            bnb_4bit_use_double_quant=name == "nf4",
            bnb_4bit_compute_dtype=torch.float32,
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(
            found["plain"],
            dtype=torch.float32,
            quantization_config=config,
            attn_implementation="eager",
            device_map="cpu",
        )
        model.save_pretrained(found[name])
    return found


def batch(step: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(step).integers(0, V, (B, T + 1))
    weights = np.ones((B, T), np.float32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def loss_fn(model: Any, batch: Any) -> jshard.Mean:
    return model.loss(batch["inputs"], batch["targets"], batch["weights"])


def our_state(fsdp: jshard.FSDP, folder: Path, *, dora: bool = False) -> Any:
    keys = huggingface.read_config(read_config(folder))

    def make(rngs: nnx.Rngs) -> nnx.Module:
        model = Llama(LlamaConfig(**keys), rngs=rngs)
        jshard.nn.add_lora(model, rank=RANK, alpha=ALPHA, dora=dora, rngs=rngs)
        return model

    abstract = fsdp.abstract_state(make, ADAMW, nnx.LoRAParam)
    source = find_parameters(folder, abstract, tensors=huggingface.tensors(keys))
    init = lambda frozen: fsdp.init(make, ADAMW, 0, nnx.LoRAParam, frozen)
    return start_from(source, abstract, init)


def make_fsdp(devices: int = 8, base: Any = "nf4") -> jshard.FSDP:
    policy = jshard.Policy(precision=jshard.Precision(base=base), min_shard_elements=0)
    return jshard.FSDP(jshard.make_mesh(devices=jax.devices()[:devices]), policy)


@pytest.mark.parametrize("kind", ["nf4", "nf4_single", "fp4_single"])
def test_a_folder_in_4_bits_is_read_as_it_is(folders, kind):
    fsdp = make_fsdp(base=kind)
    theirs, ours = (our_state(fsdp, folders[name]) for name in (kind, "plain"))
    stored = theirs.frozen["blocks"]["attention"]["q"]["kernel"]
    assert stored.get_value().dtype == jnp.uint8
    for x, y in zip(
        *(jax.tree.leaves(fsdp.fetch(s.frozen)) for s in (theirs, ours)), strict=True
    ):
        # Their scales' mean may differ in the last bit.
        np.testing.assert_allclose(x, y, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "base", "message"),
    [
        ("nf4", None, r"weights in 4 bits .* --config\.policy\.precision\.base=nf4,"),
        ("nf4", "fp4", r"is in nf4: give policy\.precision\.base=nf4;"),
        ("nf4", "nf4_single", r"is in nf4: give policy\.precision\.base=nf4;"),
        ("nf4_single", "nf4", r"is in nf4_single: give policy\.precision\.base=nf4_s"),
        ("nf4_single", None, r"--config\.policy\.precision\.base=nf4_single, or"),
    ],
)
def test_a_folder_of_another_kind_is_an_error_of_one_line(folders, name, base, message):
    with pytest.raises(jshard.UserError, match=message) as error:
        our_state(make_fsdp(base=base), folders[name])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_losses_follow_peft_beside_bitsandbytes(folders, devices, theirs):
    kind, dora, want = theirs
    fsdp = make_fsdp(devices, kind)
    state = our_state(fsdp, folders[kind], dora=dora)
    step, losses = fsdp.train_step(loss_fn, ADAMW), []
    for i in range(STEPS):
        # As many examples as three devices divide, whose weights leave B.
        state, metrics = step(state, fsdp.shard_batch(padded(batch(i), devices)))
        losses.append(float(metrics["loss"]))
    print(kind, devices, "devices:", max(np.abs(np.array(losses) / want - 1)))
    np.testing.assert_allclose(losses, want, rtol=1e-5)


def padded(batch: dict[str, np.ndarray], devices: int) -> dict[str, np.ndarray]:
    more = -B % devices
    return {k: np.pad(x, ((0, more), (0, 0))) for k, x in batch.items()}


@pytest.fixture(scope="module", params=[("nf4", False), ("nf4_single", True)])
def theirs(request, folders) -> tuple[str, bool, list[float]]:
    """The base's kind, whether it is DoRA, and PEFT's losses from our adapters."""
    kind, dora = request.param
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")

    base = transformers.AutoModelForCausalLM.from_pretrained(
        folders[kind],
        dtype=torch.float32,
        attn_implementation="eager",
        device_map="cpu",
    )
    names = [f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down")]
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=names,
        task_type="CAUSAL_LM",
        use_dora=dora,
    )
    model = peft.get_peft_model(base, config).train()
    fsdp = make_fsdp(1, kind)
    initial = fsdp.fetch(our_state(fsdp, folders[kind], dora=dora).params)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                _, _, _, _, layer, *path = name.split(".")
                parameter.copy_(torch.tensor(adapter(initial, int(layer), path)))
    return kind, dora, torch_losses(model, batch, STEPS, RATE)


def adapter(initial: Any, layer: int, path: list[str]) -> np.ndarray:
    """Our lora_a of what they call self_attn.q_proj.lora_A.default.weight."""
    group, module = path[0], path[1].removesuffix("_proj")
    ours = initial["blocks"]
    ours = ours["attention"] if group == "self_attn" else ours
    ours = ours["out" if module == "o" else module]
    return np.asarray(ours["lora_a"].get_value()[layer]).T
