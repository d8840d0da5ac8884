"""Tasks of lm_eval in a folder: YAML files, and their data beside them."""

import json
from pathlib import Path
from typing import Any

WORDS = "the quick brown fox jumps over a lazy dog and Paris is in France".split()
LONG = " ".join(WORDS * 9)  # more tokens than a small context
CHOICES = [
    {
        "question": f"{WORDS[i % 14]} {WORDS[(3 * i) % 14]} is",
        "choices": [f" {word}" for word in (WORDS[i % 14], "a dog", "é and 文字")],
        "answer": i % 3,
    }
    for i in range(11)
]
ENDS = [{"start": " ".join(WORDS[:n]), "end": f" {WORDS[n]}"} for n in range(1, 14)]
TEXTS = [{"text": text} for text in (LONG, "A token is a part of a word.", "dog")]
PROMPTS = [{"prompt": " ".join(WORDS[: n + 1])} for n in range(7)]
TASKS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "choose": (
        {
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "target_delimiter": "",
            "fewshot_split": "train",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        [{"question": LONG, "choices": [" fox", " dog", "a"], "answer": 0}, *CHOICES],
    ),
    "letter": (
        {
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}:",
            "doc_to_choice": [*"ABCDE"],  # a token each: one pass answers a question
            "doc_to_target": "answer",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}],
        },
        [{"question": LONG, "answer": 4}, *CHOICES],
    ),
    "end": (
        {
            "output_type": "loglikelihood",
            "doc_to_text": "{{start}}",
            "doc_to_target": "{{end}}",
            "target_delimiter": "",
            "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
        },
        ENDS,
    ),
    "roll": (
        {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        TEXTS,
    ),
    "write": (
        {
            "output_type": "generate_until",
            "doc_to_text": "{{prompt}}",
            "doc_to_target": "{{prompt}}",
            "generation_kwargs": {"until": ["\n", "e"], "max_gen_toks": 20},
            "metric_list": [{"metric": "exact_match"}],
        },
        [{"prompt": LONG}, *PROMPTS],
    ),
}


def write_tasks(folder: Path, **changes: dict[str, Any]) -> Path:
    """Writes the tasks, with other entries of those in `changes`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (task, rows) in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        whole = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {
                "data_files": {"train": str(data), "test": str(data)},
                "cache_dir": str(folder / "cache"),
            },
            "test_split": "test",
            "metadata": {"version": 1.0},
            **task,
            **changes.get(name, {}),
        }
        (folder / f"{name}.yaml").write_text(json.dumps(whole))  # which is YAML
    return folder
