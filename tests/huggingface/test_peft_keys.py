"""Keys that PEFT has, in our recipe beside real PEFT: patterns and whole modules."""

import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from tiny_transformers import MARKS, V, logits_of, random_decoder

import jshard
from jshard.export import export
from jshard.models import llama_huggingface as huggingface
from jshard.recipe.build import make_job, make_mesh
from jshard.recipe.configured import configure
from jshard.recipe.load import find_recipe, open_recipe
from jshard.recipe.make_config import make_config
from jshard.storage.hub.adapters import reading
from jshard.storage.hub.parameters import find_parameters, start_from
from torch_training import torch_losses

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore")]  # of torch and PEFT

B, T, STEPS, RATE = 4, 16, 20, 1e-2
# Ours besides theirs, as the command line has them.
PATTERNS: dict[str, dict[str, Any]] = {
    "ends and expressions": {
        # The first that matches counts; PEFT's files have them sorted.
        "rank_pattern": {"(o|q)_proj": 2, "o_proj": 5, r"self_attn\.(o|v)_proj": 3},
        "alpha_pattern": {r"mlp\..*": 3.0},
    },
    "from the start": {
        "rank_pattern": {r"^model\.layers\.\d+\.mlp\.down_proj": 2},
        "alpha_pattern": {r"^model.*q_proj$": 9.0, r"model.*\.(q|v)_proj": 2.0},
    },
    "whole modules": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "norms, and a layer that has none then": {
        "modules_to_save": ["norm", "o_proj"],
        "use_dora": True,
    },
}


def ours(options: dict[str, Any]) -> dict[str, Any]:
    """The keys of our recipe for PEFT's options."""
    keys = {}
    for name, value in options.items():
        pairs = isinstance(value, dict)
        keys[f"lora.{name.removeprefix('use_')}"] = (
            [f"{x}:{n}" for x, n in value.items()] if pairs else value
        )
    return keys


def batch(step: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(step).integers(0, V, (B, T + 1))
    weights = np.ones((B, T), np.float32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def their_model(peft: Any, base: Path, adapters: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        base, attn_implementation="eager"
    )
    return peft.PeftModel.from_pretrained(model, adapters, is_trainable=True)


def check_logits(job: Any, state: Any, theirs: Any, within: float) -> None:
    tokens = batch(0)["inputs"]
    got = np.asarray(job.fsdp.model(state)(tokens))
    want = logits_of(theirs, tokens)
    np.testing.assert_allclose(got, want, rtol=0, atol=within * np.abs(want).max())


@pytest.mark.parametrize("case", PATTERNS)
def test_runs_with_the_keys_of_peft_are_those_of_peft(case, tmp_path):
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft", reason="needs peft")
    base, adapters, options = tmp_path / "base", tmp_path / "adapters", PATTERNS[case]
    model = random_decoder("LlamaConfig")
    model.save_pretrained(base)
    targets = ["q_proj", "v_proj", "o_proj", "down_proj"]
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM", **options
    )
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                start = 0 if "lora_A" in name or "lora_B" in name else parameter
                parameter.copy_(start + torch.randn_like(parameter) * 0.1)
    adapted.save_pretrained(adapters)
    theirs = their_model(peft, base, adapters)

    keys = {"model.from": base, "lora.targets": targets, "lora.rank": 4}
    keys |= {"lora.alpha": 6.0, "lora.base_dtype": "float32"} | ours(options)
    keys |= {"policy.precision.compute": "float32", "policy.min_shard_elements": 0}
    with open_recipe(find_recipe("finetune.py")) as recipe:
        made = make_config(recipe, keys | {"mesh.fsdp": 2, "mesh.replica": 1})
        configured = configure(recipe, made)
        mesh = make_mesh(configured.settings.mesh, jax.devices()[:2])
        job = make_job(configured, mesh)
        tensors = huggingface.tensors(made.model)
        optimizer = optax.adamw(RATE, weight_decay=0.0)
        options = {"wrt": job.trainable}
        abstract = job.fsdp.abstract_state(job.make_model, optimizer, **options)
        initial = lambda frozen=None: job.fsdp.init(
            job.make_model, optimizer, 0, job.trainable, frozen
        )
        source = find_parameters(base, abstract, tensors=tensors)
        state = start_from(source, abstract, initial)
        state = reading.read_adapters(adapters, state, tensors)
        step = job.fsdp.train_step(recipe.loss_fn, optimizer)
        check_logits(job, state, theirs, within=1e-5)
        want, losses = torch_losses(theirs.train(), batch, STEPS, RATE), []
        for i in range(STEPS):
            state, metrics = step(state, job.fsdp.shard_batch(batch(i)))
            losses.append(float(metrics["loss"]))
    print("worst of a loss:", max(np.abs(np.array(losses) / want - 1)))
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    check_logits(job, state, theirs, within=1e-4)

    recorded = {"model": dict(made.model), "checkpoint": {"restore": str(base)}}
    with jshard.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(state, config=recorded, frozen_from=base)
    for kind in ("peft", "huggingface"):
        name = str(find_recipe("finetune.py"))
        export(tmp_path / "run", tmp_path / kind, format=kind, recipe=name)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of missing keys
        again = their_model(peft, base, tmp_path / "peft")
    check_logits(job, state, again, within=1e-5)
    transformers = pytest.importorskip("transformers")
    merged, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "huggingface", attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    check_logits(job, state, merged, within=1e-5)
