"""Losses beside Hugging Face's Trainer, PEFT and TRL, by keys alone.

    python benchmarks/peers_by_keys.py [NAME ...]

Needs PyTorch, transformers, PEFT, TRL and datasets beside jshard; downloads nothing.
Both start from a folder of a small random Llama that transformers writes, with a
tokenizer and JSONL, and train for 20 steps in float32. jshard is its command line and
nothing else; on two virtual devices. Its data is shuffled by its seed: the peer gets
the rows in that order and a sequential sampler. Adapters start as PEFT has drawn them.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import datasets  # pyright: ignore[reportMissingImports]
import peft  # pyright: ignore[reportMissingImports]
import tokenizers  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
import trl  # pyright: ignore[reportMissingImports]

from jshard.recipe.load import find_recipe, open_recipe
from jshard.recipe.make_config import make_config

ROOT = Path(__file__).resolve().parents[1]
STEPS, ROWS, T = 20, 8, 63
WORDS = (
    "the model reads a row of words and learns which of them is the next one".split()
)
TEMPLATE = (
    "{% for x in messages %}<|im_start|>{{ x['role'] }}\n{% if x['role'] == 'user' %}"
    "{{ x['content'] }}<|im_end|>\n{% else %}{% generation %}{{ x['content'] }}"
    "<|im_end|>\n{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<pad>", "<|im_start|>", "<|im_end|>")

# Those of the peer that are not its defaults, and jshard's keys for them and for the
# defaults that differ (docs/coming_from/hugging_face_trainer.md).
THEIRS = {
    "max_steps": STEPS,
    "per_device_train_batch_size": ROWS,
    "learning_rate": 1e-3,
    "weight_decay": 0.05,
    "warmup_steps": 4,
    "logging_steps": 1,
    "train_sampling_strategy": "sequential",
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
}
OURS = {
    "steps": STEPS,
    "batch_size": ROWS,
    "optimizer.learning_rate": 1e-3,
    "optimizer.weight_decay": 0.05,
    "optimizer.schedule": "linear",
    "optimizer.final_fraction": 0,
    "optimizer.warmup_steps": 4,
    "optimizer.initial_fraction": 0,
    "policy.precision.compute": "float32",
    "data.sequence_length": T,
    "data.validation_fraction": 0,
    "log_every": 1,
    "eval_every": 0,
    "checkpoint.every": 0,
    "sample.length": 0,
}
# One text per row, as a collator that pads has them.
ALONE = {"data.pack": True, "data.max_segments": 2}
ADAPTERS = {"lora.targets": ("q_proj", "v_proj"), "lora.rank": 8, "lora.alpha": 8.0}
ADAPTERS |= {"lora.base_dtype": "float32", "optimizer.learning_rate": 1e-2}
FAST = {"learning_rate": 1e-2}  # so that adapters move in so few steps


class Case(NamedTuple):
    """A run of both: their classes, arguments and rows, and our recipe and keys."""

    trainer: Callable[..., Any]
    rows: Callable[[int], dict[str, Any]]
    theirs: dict[str, Any]
    lora: dict[str, Any] | None
    recipe: str
    keys: dict[str, Any]


def sentence(number: int) -> str:
    """Returns a text that no other number has."""
    words = (WORDS[number * k % len(WORDS)] for k in range(1, 8 + number % 11))
    return f"Row {number}. {' '.join(words)}"


def text(number: int) -> dict[str, Any]:
    return {"text": sentence(number)}


def chat(number: int) -> dict[str, Any]:
    asked = {"role": "user", "content": f"Row {number}. Go on."}
    return {"messages": [asked, {"role": "assistant", "content": sentence(number)}]}


def completion(number: int) -> dict[str, Any]:
    return {"prompt": f"Row {number}. Go on:", "completion": f" {sentence(number)}"}


def pair(number: int) -> dict[str, Any]:
    answers = {"chosen": f" {sentence(number)}", "rejected": f" {sentence(number + 5)}"}
    return {"prompt": f"Row {number}. Go on:"} | answers


def trainer(*, model: Any, args: dict[str, Any], rows: Any, tokenizer: Any) -> Any:
    """Returns a Trainer on texts that end with the tokenizer's token for that."""
    end = tokenizer.eos_token
    tokens = rows.map(lambda row: tokenizer(row["text"] + end), remove_columns=["text"])
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**args),
        train_dataset=tokens,
        data_collator=transformers.DataCollatorForLanguageModeling(
            tokenizer, mlm=False
        ),
    )


def of_trl(name: str) -> Callable[..., Any]:
    """Returns what makes a trainer of TRL's, in float32 as jshard's run is."""

    def make(*, model: Any, args: dict[str, Any], rows: Any, tokenizer: Any) -> Any:
        config = getattr(trl, f"{name}Config")(**args, bf16=False, max_length=T + 1)
        return getattr(trl, f"{name}Trainer")(
            model=model, args=config, train_dataset=rows, processing_class=tokenizer
        )

    return make


FINETUNE, PREFERENCE = "finetune.py", "preference.py"


def of_texts(
    rows: Any, theirs: dict[str, Any], keys: dict[str, Any], lora: Any = None
) -> Case:
    """Returns a run of the model itself, or with PEFT's arguments of adapters."""
    make = trainer if rows is text else of_trl("SFT")
    own = {"lora.rank": 0} if lora is None else ADAPTERS
    theirs = theirs if lora is None or "learning_rate" in theirs else FAST | theirs
    return Case(make, rows, theirs, lora, FINETUNE, ALONE | own | keys)


def of_pairs(theirs: dict[str, Any], keys: dict[str, Any]) -> Case:
    """Returns a run of DPO, whose adapters from a folder need a reference of theirs."""
    keys = ADAPTERS | {"preference.keep_reference": True} | keys
    return Case(of_trl("DPO"), pair, FAST | theirs, {}, PREFERENCE, keys)


OF_ADAMW = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-3}
OUR_ADAMW = {"optimizer.b1": 0.8, "optimizer.b2": 0.95, "optimizer.eps": 1e-3}
CASES = {
    "HF Trainer": of_texts(text, {}, {}),
    "PEFT LoRA": of_texts(text, {}, {}, {}),
    "PEFT DoRA": of_texts(
        text,
        {},
        {"lora.dora": True, "optimizer.decay_norms": True},
        {"use_dora": True},
    ),
    "TRL SFT, chats": of_texts(chat, {}, {"data.train_on": "all"}),
    "TRL SFT, completions": of_texts(completion, {}, {}, {}),
    "TRL DPO": of_pairs({}, {}),
    "modules_to_save": of_texts(
        text,
        {"learning_rate": 1e-3},
        {"lora.modules_to_save": ("lm_head", "norm"), "optimizer.learning_rate": 1e-3},
        {"modules_to_save": ["lm_head", "norm"]},
    ),
    "label_smoothing_factor": of_texts(
        text, {"label_smoothing_factor": 0.1}, {"model.label_smoothing": 0.1}
    ),
    "gradient_accumulation_steps": of_texts(
        text,
        {"per_device_train_batch_size": ROWS // 2, "gradient_accumulation_steps": 2},
        {"policy.accumulate": 2},
    ),
    "cosine, AdamW's numbers": of_texts(
        text,
        {"lr_scheduler_type": "cosine", "warmup_steps": 0.2, **OF_ADAMW},
        {"optimizer.schedule": "cosine", "optimizer.warmup_fraction": 0.2, **OUR_ADAMW},
    ),
    "max_grad_norm": of_texts(
        text,
        {"max_grad_norm": 0.1, **OF_ADAMW},
        {"optimizer.clip_norm": 0.1, **OUR_ADAMW},
    ),
    "assistant_only_loss": of_texts(chat, {"assistant_only_loss": True}, {}),
    "loss_type ipo": of_pairs({"loss_type": ["ipo"]}, {"preference.loss": "ipo"}),
    "loss_type hinge": of_pairs({"loss_type": ["hinge"]}, {"preference.loss": "hinge"}),
    "loss_type robust": of_pairs(
        {"loss_type": ["robust"], "label_smoothing": 0.1},
        {"preference.loss": "robust", "preference.label_smoothing": 0.1},
    ),
}


def make_folder(folder: Path) -> Any:
    """Writes a small random Llama and its tokenizer; returns the tokenizer."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    learn = tokenizers.trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=list(SPECIAL),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([sentence(i) for i in range(200)], learn)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=SPECIAL[0], pad_token=SPECIAL[1]
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=0,
        pad_token_id=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return tokenizer


def our_keys(case: Case, folder: Path) -> dict[str, Any]:
    """Returns all keys of our run but its workdir."""
    given = {
        "model.from": folder / "base",
        "checkpoint.restore": folder / "base",
        "data.tokenizer": folder / "base",
        "data.path": folder / "rows.jsonl",
    }
    if case.lora is not None:
        given["checkpoint.adapters"] = folder / "adapters"
    return given | OURS | case.keys


def our_order(case: Case, folder: Path, tokenizer: Any) -> list[int]:
    """Returns the numbers of the rows in the order in which our run reads them."""
    keys = {k: v for k, v in our_keys(case, folder).items() if "adapters" not in k}
    with open_recipe(find_recipe(case.recipe)) as recipe:
        rows = recipe.make_data(make_config(recipe, keys), "train")
        found = [rows[i]["inputs"] for i in range(STEPS * ROWS)]
    # The tokens of a pair's answers take turns.
    turns = 2 if case.recipe == PREFERENCE else 1
    texts = [tokenizer.decode(x[::turns]) for x in found]
    return [int(text.partition("Row ")[2].partition(".")[0]) for text in texts]


def as_words(keys: dict[str, Any]) -> list[str]:
    """Returns keys as the command line has them."""
    lists = {k: ",".join(v) for k, v in keys.items() if isinstance(v, tuple)}
    return [f"{key}={value}" for key, value in (keys | lists).items()]


def our_losses(case: Case, folder: Path) -> list[float]:
    """Returns the losses of our run, which is a command."""
    words = [sys.executable, "-m", "jshard.train", f"--config={case.recipe}"]
    words += [f"--workdir={folder / 'ours'}"]
    words += [f"--config.{key}" for key in as_words(our_keys(case, folder))]
    print(shlex.join(words), flush=True)
    env = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": str(ROOT)}
    env = os.environ | env
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    lines = (folder / "ours" / "metrics.jsonl").read_text().splitlines()
    return [x["loss"] for x in map(json.loads, lines) if "loss" in x]


def their_losses(case: Case, folder: Path, tokenizer: Any) -> list[float]:
    """Returns the losses of the peer, which writes its adapters before it trains."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "base", dtype=torch.float32
    )
    if case.lora is not None:
        lora = peft.LoraConfig(task_type="CAUSAL_LM", **case.lora)
        model = peft.get_peft_model(model, lora)
        model.save_pretrained(folder / "adapters")
    rows = datasets.Dataset.from_list(
        [case.rows(i) for i in our_order(case, folder, tokenizer)]
    )
    args = {"output_dir": str(folder / "theirs")} | THEIRS | case.theirs
    peer = case.trainer(model=model, args=args, rows=rows, tokenizer=tokenizer)
    peer.train()
    return [line["loss"] for line in peer.state.log_history if "loss" in line]


def compare(case: Case, folder: Path) -> list[tuple[float, float]]:
    """Returns the losses of each step, theirs and ours."""
    tokenizer = make_folder(folder / "base")
    lines = (json.dumps(case.rows(i)) for i in range(STEPS * ROWS))
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    theirs = their_losses(case, folder, tokenizer)
    ours = our_losses(case, folder)
    assert len(theirs) == len(ours) == STEPS, (len(theirs), len(ours))
    return list(zip(theirs, ours, strict=True))


def main() -> None:
    """Prints each command and a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}")
    parser.add_argument("--steps", action="store_true", help="print all losses")
    args = parser.parse_args()
    table = ["| peer | own keys | first loss | last | largest difference |"]
    table.append("|---|---|---|---|---|")
    for name in args.names or CASES:
        folder = Path(tempfile.mkdtemp())
        try:
            losses = compare(CASES[name], folder)
        finally:
            shutil.rmtree(folder)
        if args.steps:
            print(*(f"{a:.7f} {b:.7f} {b - a:+.1e}" for a, b in losses), sep="\n")
        most = max(abs(a - b) for a, b in losses)
        first, last = losses[0][0], losses[-1][0]
        shared = ADAPTERS if "lora.targets" in CASES[name].keys else {}
        keys = CASES[name].keys.items() - (ALONE | shared).items()
        own = ", ".join(f"`{x}`" for x in sorted(as_words(dict(keys))))
        table.append(f"| {name} | {own} | {first:.4f} | {last:.4f} | {most:.1e} |")
    print("\n".join(table))


if __name__ == "__main__":
    main()
