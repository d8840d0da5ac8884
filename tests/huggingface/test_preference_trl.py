"""Preference training against TRL's, in torch: tokens, losses, rewards, gradients."""

import json
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from checkpoints import read_parameters
from jshard.models import llama_huggingface
from jshard.recipe.build import make_job, make_mesh
from jshard.recipe.configured import configure
from jshard.recipe.load import find_recipe, open_recipe
from jshard.recipe.make_config import make_config
from jshard.storage.hub.adapters import reading
from jshard.storage.hub.parameters import find_parameters
from small_tokenizer import CHATML
from tiny_llama import make_llama

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of torch, transformers and TRL
]

T, RATE, STEPS = 47, 0.5, 3
TEXTS = [
    {
        "prompt": "The capital of France",
        "chosen": " is Paris.",
        "rejected": " is 1234.",
    },
    {"prompt": "A token is a part", "chosen": " of a word", "rejected": " of the dog."},
    {"prompt": "The quick brown", "chosen": " fox jumps over", "rejected": " dog"},
    {"prompt": "Numbers like", "chosen": " 5.6", "rejected": " accents like é and ñ"},
]
METRICS = {
    "rewards/chosen": "reward_chosen",
    "rewards/rejected": "reward_rejected",
    "rewards/accuracies": "reward_accuracy",
    "rewards/margins": "reward_margin",
    "logps/chosen": "log_prob_chosen",
    "logps/rejected": "log_prob_rejected",
}


def chats() -> list[dict[str, Any]]:
    """The texts as chats, every second with its prompt in the answers."""
    found = []
    for i, record in enumerate(TEXTS):
        asked = [{"role": "user", "content": record["prompt"]}]
        answers: dict[str, Any] = {
            name: [{"role": "assistant", "content": record[name].strip()}]
            for name in ("chosen", "rejected")
        }
        found.append({"prompt": asked, **answers})
        if i == 3:  # longer than T
            found[-1]["chosen"][0]["content"] += " and more text" * 10
    return found


def implicit() -> list[dict[str, Any]]:
    return [
        {name: x["prompt"] + x[name] for name in ("chosen", "rejected")}
        for x in chats()
    ]


@pytest.fixture(scope="module")
def trl() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("peft", reason="needs peft")
        yield pytest.importorskip("trl", reason="needs trl")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    pytest.importorskip("tokenizers")
    folder = make_llama(tmp_path_factory.mktemp("base"))
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "chats": (chats, {"loss_type": "sigmoid"}, {}),
    "implicit": (implicit, {"loss_type": "sigmoid"}, {}),
    "texts": (lambda: TEXTS, {"loss_type": "sigmoid", "beta": 0.3}, {"beta": 0.3}),
    "normalized": (
        chats,
        {"loss_type": "sigmoid_norm", "beta": 0.5},
        {"length_normalized": True, "beta": 0.5},
    ),
    # Of one pair, TRL's optimal transport is the smoothed loss of DPO.
    "smoothed": (
        lambda: TEXTS[:1],
        {"loss_type": "aot", "label_smoothing": 0.2},
        {"label_smoothing": 0.2},
    ),
    "robust": (
        chats,
        {"loss_type": "robust", "label_smoothing": 0.2},
        {"loss": "robust", "label_smoothing": 0.2},
    ),
    "hinge": (chats, {"loss_type": "hinge"}, {"loss": "hinge"}),
    "ipo": (chats, {"loss_type": "ipo", "beta": 0.5}, {"loss": "ipo", "beta": 0.5}),
    "orpo": (lambda: TEXTS, {"beta": 0.2}, {"loss": "orpo", "beta": 0.2}),
}


def their_trainer(
    trl: Any, base: Path, records: list, options: dict[str, Any], workdir: Path
) -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    datasets = pytest.importorskip("datasets")
    peft = pytest.importorskip("peft")

    config, make = trl.DPOConfig, trl.DPOTrainer
    if "loss_type" not in options:
        from trl.experimental.orpo import (  # pyright: ignore[reportMissingImports]
            ORPOConfig,
            ORPOTrainer,
        )

        config, make = ORPOConfig, ORPOTrainer
    args = config(
        output_dir=str(workdir),
        max_length=T + 1,
        per_device_train_batch_size=len(records),
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=1e9,
        weight_decay=0.0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        **options,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = tokenizer.eos_token
    trainer = make(
        model=transformers.AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32, attn_implementation="eager"
        ),
        args=args,
        train_dataset=datasets.Dataset.from_list(records),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(
            r=2,
            lora_alpha=8,
            lora_dropout=0.0,
            target_modules=["q_proj", "v_proj", "down_proj"],
            task_type="CAUSAL_LM",
        ),
    )
    torch.manual_seed(1)
    with torch.no_grad():  # so that the reference is another model
        for name, parameter in trainer.model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    return trainer


@pytest.mark.parametrize("case", CASES)
def test_losses_rewards_and_training_are_those_of_trl(
    transformers5, case, trl, base, tmp_path
):
    make_records, options, keys = CASES[case]
    records = make_records()
    trainer = their_trainer(trl, base, records, options, tmp_path / "theirs")
    adapters = tmp_path / "adapters"
    trainer.model.save_pretrained(adapters)
    trainer.train()
    want = [line for line in trainer.state.log_history if "loss" in line]
    assert len(want) == STEPS

    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    given = {
        "model.from": base,
        "data.path": path,
        "data.tokenizer": base,
        "data.sequence_length": T,
        "data.validation_fraction": 0.0,
        "lora.rank": 2,
        "lora.alpha": 8.0,
        "lora.targets": ["attention.q", "attention.v", "down"],
        "lora.base_dtype": "float32",
        "policy.precision.compute": "float32",
        "policy.min_shard_elements": 0,
        "mesh.fsdp": 4 if len(records) == 4 else 1,
        "mesh.replica": 1,
    }
    given |= {f"preference.{name}": value for name, value in keys.items()}
    with open_recipe(find_recipe("preference.py")) as recipe:
        config = make_config(recipe, given)
        devices = jax.devices()[: config.mesh.fsdp]
        configured = configure(recipe, config)
        job = make_job(configured, make_mesh(configured.settings.mesh, devices))
        optimizer = optax.sgd(RATE)
        state = job.fsdp.init(job.make_model, optimizer, wrt=nnx.LoRAParam)
        model = llama_huggingface.read_config(
            json.loads((base / "config.json").read_text())
        )
        tensors = llama_huggingface.tensors(model)
        state = read_parameters(find_parameters(base, state, tensors=tensors), state)
        state = reading.read_adapters(adapters, state, tensors)
        step = job.fsdp.train_step(recipe.loss_fn, optimizer)
    rows = recipe.make_data(config, "train")
    examples = [rows[i] for i in range(len(records))]  # an epoch
    batch = {name: np.stack([x[name] for x in examples]) for name in examples[0]}
    for line in want:
        state, metrics = step(state, job.fsdp.shard_batch(batch))
        got = {name: float(x) for name, x in metrics.items()}
        assert got["loss"] == pytest.approx(line["loss"], rel=1e-5, abs=1e-5)
        for theirs, ours in METRICS.items():
            if case == "orpo" and theirs.startswith("logps"):
                continue  # TRL's are means over tokens there
            assert got[ours] == pytest.approx(line[theirs], rel=1e-5, abs=1e-5), ours
    assert any(want[0][name] != want[-1][name] for name in METRICS)
