"""LoRA against PEFT, in torch: the same losses, and adapters in its files."""

import functools
import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from tiny_transformers import MARKS, V, logits_of, random_decoder

import jshard
from jshard.export import export
from jshard.models import llama_huggingface as huggingface
from jshard.models.llama import Llama, LlamaConfig
from jshard.storage.hub import peft as files
from jshard.storage.hub.adapters import reading
from jshard.storage.hub.parameters import find_parameters, start_from
from parity import make_mesh
from torch_training import torch_losses

pytestmark = [
    *MARKS,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers:UserWarning"),
]

B, T, RANK, ALPHA, STEPS, RATE = 8, 16, 4, 6, 20, 1e-2
RECIPE = str(Path(__file__).parents[2] / "train" / "finetune.py")
ADAMW = optax.adamw(RATE, weight_decay=0.0)


@pytest.fixture(scope="module")
def torch_peft():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
        yield pytest.importorskip("peft", reason="needs peft")


class Kind(NamedTuple):
    """What adapters there are, in PEFT's words and in ours."""

    theirs: dict[str, Any]
    ours: dict[str, Any]
    more_theirs: tuple[str, ...] = ()
    more_ours: tuple[str, ...] = ()


KINDS = {
    "lora": Kind({}, {}),
    "rslora": Kind({"use_rslora": True}, {"rank_stabilized": True}),
    "dora": Kind({"use_dora": True}, {"dora": True}, ("lm_head",), ("head",)),
    "patterns": Kind(
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 3}},
        {"ranks": {"blocks.attention.q": 2}, "alphas": {"blocks.down": 3}},
    ),
    "tables": Kind({}, {}, ("embed_tokens", "lm_head"), ("embed", "head")),
}


class Folders(NamedTuple):
    base: Path
    adapters: Path
    kind: Kind


@pytest.fixture(scope="module", params=KINDS)
def folders(request, torch_peft, tmp_path_factory) -> Folders:
    """A tiny Llama, and random adapters of some of its layers, as PEFT saves them."""
    torch = pytest.importorskip("torch")
    kind = KINDS[request.param]

    base, adapters = (tmp_path_factory.mktemp(name) for name in ("base", "adapters"))
    model = random_decoder("LlamaConfig")
    model.save_pretrained(base)
    config = torch_peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=["q_proj", "o_proj", "down_proj", *kind.more_theirs],
        task_type="CAUSAL_LM",
        **kind.theirs,
    )
    adapted = torch_peft.get_peft_model(model, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                start = parameter if "magnitude" in name else 0
                parameter.copy_(start + torch.randn_like(parameter) * 0.1)
    adapted.save_pretrained(adapters)
    return Folders(base, adapters, kind)


def their_model(torch_peft: Any, base: Path, adapters: Path) -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    model = transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, attn_implementation="eager"
    )
    return torch_peft.PeftModel.from_pretrained(model, adapters, is_trainable=True)


def their_logits(model: Any) -> np.ndarray:
    return logits_of(model, batch(0)["inputs"])


def batch(step: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(step).integers(0, V, (B, T + 1))
    weights = np.ones((B, T), np.float32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def loss_fn(model: Any, batch: Any) -> jshard.Mean:
    return model.loss(batch["inputs"], batch["targets"], batch["weights"])


def model_keys(base: Path) -> dict[str, Any]:
    return huggingface.read_config(json.loads((base / "config.json").read_text()))


def make_fsdp(mesh: tuple[int, int] = (1, 8)) -> jshard.FSDP:
    return jshard.FSDP(make_mesh(*mesh), jshard.Policy(min_shard_elements=0))


def start(fsdp: jshard.FSDP, make: Any, base: Path, tensors: Any) -> Any:
    """A state as a run starts with it."""
    abstract = fsdp.abstract_state(make, ADAMW, wrt=nnx.LoRAParam)
    source = find_parameters(base, abstract, tensors=tensors)
    initial_state = functools.partial(fsdp.init, make, ADAMW, 0, nnx.LoRAParam)
    return start_from(source, abstract, initial_state)


def our_state(fsdp: jshard.FSDP, folders: Folders, adapters: bool = True) -> Any:
    keys = model_keys(folders.base)
    targets = ("attention.q", "attention.out", "down", *folders.kind.more_ours)
    given: dict[str, Any] = {"rank": RANK, "alpha": ALPHA, "targets": targets}

    def make(rngs: nnx.Rngs) -> nnx.Module:
        model = Llama(LlamaConfig(**keys), rngs=rngs)
        jshard.nn.add_lora(model, **given, **folders.kind.ours, rngs=rngs)
        return model

    tensors = huggingface.tensors(keys)
    state = start(fsdp, make, folders.base, tensors)
    if not adapters:
        return state
    return reading.read_adapters(folders.adapters, state, tensors)


def our_logits(fsdp: jshard.FSDP, state: Any) -> np.ndarray:
    predict = fsdp.predict_step(lambda model, batch: model(batch["inputs"]))
    examples = fsdp.shard_batch(padded(batch(0), fsdp.mesh.size))
    return np.asarray(predict(state, examples))[:B]


def check_close(got: np.ndarray, want: np.ndarray, within: float = 1e-5) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=within * np.abs(want).max())


def test_losses_follow_peft(torch_peft, folders):
    theirs = their_model(torch_peft, folders.base, folders.adapters).train()
    want = torch_losses(theirs, batch, STEPS, RATE)

    for mesh in ((1, 8), (2, 4), (1, 1), (1, 2), (1, 3)):
        fsdp = make_fsdp(mesh)
        state = our_state(fsdp, folders)
        step, losses = fsdp.train_step(loss_fn, ADAMW), []
        for i in range(STEPS):
            state, metrics = step(
                state, fsdp.shard_batch(padded(batch(i), fsdp.mesh.size))
            )
            losses.append(float(metrics["loss"]))
        print(mesh, "worst of a loss:", max(np.abs(np.array(losses) / want - 1)))
        np.testing.assert_allclose(losses, want, rtol=1e-5)
        # AdamW's first steps have the size of the rate, whatever the gradient's.
        check_close(our_logits(fsdp, state), their_logits(theirs), within=1e-4)


def padded(batch: dict[str, np.ndarray], devices: int) -> dict[str, Any]:
    more = -B % devices
    return {k: np.pad(x, ((0, more), (0, 0))) for k, x in batch.items()}


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory) -> tuple[Any, Path]:
    """Our state after a step, and a checkpoint of it that leaves the base out."""
    base = folders.base
    fsdp, folder = make_fsdp(), tmp_path_factory.mktemp("run")
    state = our_state(fsdp, folders)
    state, _ = fsdp.train_step(loss_fn, ADAMW)(state, fsdp.shard_batch(batch(0)))
    config = {"model": model_keys(base), "checkpoint": {"restore": str(base)}}
    with jshard.Checkpointer(folder) as checkpointer:
        checkpointer.save(state, config=config, frozen_from=base)
    return our_logits(fsdp, state), folder


def test_peft_reads_our_adapters(torch_peft, folders, trained, tmp_path):
    logits, run = trained
    export(run, tmp_path / "out", format="peft", recipe=RECIPE)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    targets = ["down_proj", "o_proj", "q_proj", *folders.kind.more_theirs]
    assert config["target_modules"] == sorted(targets)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of missing keys
        theirs = their_model(torch_peft, folders[0], tmp_path / "out")
    check_close(logits, their_logits(theirs))


def test_adapters_go_through_our_run_unchanged(folders, tmp_path):
    base, adapters, _ = folders
    state = our_state(make_fsdp(), folders)
    with jshard.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(state, config={"model": model_keys(base)}, frozen_from=base)
    export(tmp_path / "run", tmp_path / "out", format="peft", recipe=RECIPE)
    got, want = (load_file(x / files.TENSORS) for x in (tmp_path / "out", adapters))
    want = {k: x for k, x in want.items() if ".base_layer." not in k}
    assert got.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, name)


@pytest.mark.parametrize("left_out", [True, False])
def test_merged_they_are_an_ordinary_model(
    left_out, torch_peft, folders, trained, tmp_path
):
    transformers = pytest.importorskip("transformers")

    logits, run = trained
    if not left_out:
        fsdp, run = make_fsdp((2, 4)), tmp_path / "run"
        state = our_state(fsdp, folders)
        logits = our_logits(fsdp, state)
        with jshard.Checkpointer(run) as checkpointer:
            checkpointer.save(state, config={"model": model_keys(folders[0])})
    export(run, tmp_path / "out", format="huggingface", recipe=RECIPE)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    check_close(their_logits(model), logits)


def test_other_adapters_are_an_error_of_one_line(folders, tmp_path):
    adapters, kind = folders.adapters, folders.kind
    state = our_state(make_fsdp(), folders, adapters=False)
    tensors = huggingface.tensors(model_keys(folders.base))

    def refused(**config: Any) -> str:
        there = json.loads((adapters / files.CONFIG).read_text()) | config
        folder = tmp_path / "-".join(config)
        folder.mkdir()
        (folder / files.CONFIG).write_text(json.dumps(there))
        (folder / files.TENSORS).write_bytes((adapters / files.TENSORS).read_bytes())
        with pytest.raises(jshard.UserError) as error:
            reading.check_adapters(folder, state, tensors)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "lora.rank=8 there" in refused(r=8)
    assert "target_parameters" in refused(target_parameters=["experts.down_proj"])
    for theirs, ours in (("use_dora", "dora"), ("use_rslora", "rslora")):
        other = not kind.theirs.get(theirs, False)
        assert f"lora.{ours}={other} there" in refused(**{theirs: other})
    assert "modules_to_save='lm_head' there" in refused(modules_to_save=["lm_head"])
    assert "init_lora_weights='pissa'" in refused(init_lora_weights="pissa")
    assert "bias='all' is not supported" in refused(bias="all")
    with pytest.raises(jshard.UserError, match="there is no"):
        reading.check_adapters(tmp_path, state, tensors)
    of_another_base = load_file(adapters / files.TENSORS)
    name = next(
        name for name in of_another_base if name.endswith("o_proj.lora_A.weight")
    )
    of_another_base[name] = np.zeros((RANK, 80), np.float32)
    save_file(of_another_base, tmp_path / files.TENSORS)
    (tmp_path / files.CONFIG).write_text((adapters / files.CONFIG).read_text())
    with pytest.raises(jshard.UserError, match=r"has shape \(4, 80\), not \(4, 32\)"):
        reading.check_adapters(tmp_path, state, tensors)


# Of the names in PEFT's own conversion of experts; the logits are compared.
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern:RuntimeWarning")
@pytest.mark.parametrize("targets", [["*", "experts.*"], ["experts.*"]])
@pytest.mark.parametrize(
    ("config", "options"),
    [
        ("MixtralConfig", {"num_local_experts": 4, "sliding_window": None}),
        (
            "Qwen3MoeConfig",
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        ),
    ],
)
def test_peft_and_transformers_read_experts(
    torch_peft, config, options, targets, tmp_path
):
    transformers = pytest.importorskip("transformers")
    random_decoder(config, **options).save_pretrained(tmp_path / "base")
    keys = model_keys(tmp_path / "base")

    def make(rngs: nnx.Rngs) -> nnx.Module:
        model = Llama(LlamaConfig(**keys), rngs=rngs)
        given: dict[str, Any] = {"rank": RANK, "alpha": ALPHA, "targets": targets}
        jshard.nn.add_lora(model, **given, rngs=rngs)
        for _, x in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
            noise = 0.1 * jax.random.normal(rngs.params(), x.get_value().shape)
            x.set_value(x.get_value() + noise)
        return model

    fsdp, tensors = make_fsdp(), huggingface.tensors(keys)
    state = start(fsdp, make, tmp_path / "base", tensors)
    logits = our_logits(fsdp, state)
    run, base = tmp_path / "run", tmp_path / "base"
    with jshard.Checkpointer(run) as checkpointer:
        checkpointer.save(state, config={"model": keys}, frozen_from=base)
    for kind in ("peft", "huggingface"):
        export(run, tmp_path / kind, format=kind, recipe=RECIPE)
    load = transformers.AutoModelForCausalLM.from_pretrained
    merged = load(tmp_path / "huggingface", attn_implementation="eager")
    check_close(their_logits(merged), logits)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of missing keys
        theirs = their_model(torch_peft, base, tmp_path / "peft")
    check_close(their_logits(theirs), logits)
    again = reading.read_adapters(
        tmp_path / "peft", fsdp.init(make, ADAMW, seed=1, wrt=nnx.LoRAParam), tensors
    )
    jax.tree.map(
        np.testing.assert_array_equal,
        fsdp.fetch(again.params),
        fsdp.fetch(state.params),
    )
