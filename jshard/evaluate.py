"""Scores a model: `python -m jshard.evaluate --model=RUN_OR_DIR --tasks=hellaswag`."""

import json
import os
from pathlib import Path
from typing import Any

import jax

from jshard.data.tokenizers.tokenizer import Tokenizer
from jshard.inference.evaluate.tasks import ROWS, load_tasks
from jshard.inference.generation.prompts import check_decoder
from jshard.inference.trained.model_command import MODEL_OPTIONS, started
from jshard.inference.trained.trained_model import TrainedModel
from jshard.inference.trained.weight_option import WEIGHTS, place_weights
from jshard.storage.hub.huggingface_folder import is_huggingface
from jshard.system.cli.command import run_command
from jshard.system.cli.options import Command, Option
from jshard.system.cli.terminal import show
from jshard.system.errors import UserError
from jshard.system.files.atomic import replace_file

COMMAND = Command(
    "evaluate",
    "Scores a trained model on tasks of EleutherAI's lm_eval.",
    {
        **MODEL_OPTIONS,
        "tasks": Option(
            None, "tasks, groups, patterns or YAML files: hellaswag,mmlu_*", kind=str,
            required=True, shown="TASK,...",
        ),
        "include_path": Option(
            None, "a folder with more tasks, as YAML files", kind=Path, shown="DIR"
        ),
        "num_fewshot": Option(
            None, "number of examples before each question; by default the task's own",
            kind=int, at_least=0, at_most=1000,
        ),
        "limit": Option(
            None, "number of examples of each task to score, or a fraction of them if "
            "below 1", kind=float, above=0, at_most=10**9,
        ),
        "batch_size": Option(
            ROWS, "number of requests computed at once, over all devices", at_least=1,
            at_most=10**6,
        ),
        "apply_chat_template": Option(
            False, "write questions as chats, and examples as earlier turns"
        ),
        "system_instruction": Option(
            None, "the system message, or without chats the beginning of each prompt",
            kind=str,
        ),
        "gen_kwargs": Option(
            None, "generate texts with these settings instead of the tasks': "
            "temperature=0.8,max_gen_toks=64, or a JSON object", kind=str,
            shown="KEY=VALUE,...",
        ),
        "output": Option(
            None, "write lm_eval's results to this file, as JSON", kind=Path,
            shown="FILE",
        ),
        "log_samples": Option(False, "add each example and its answers to --output"),
        "weights": WEIGHTS,
    },
)  # fmt: skip
_RESAMPLED = 1000  # times, for standard errors; 100,000 take pools of processes


def main() -> None:
    """Runs the command line; exits 0 done, 2 bad input, 130 Ctrl-C, 1 anything else."""
    run_command(run_evaluate)


def run_evaluate(argv: list[str]) -> None:
    """Scores the model on the tasks that the arguments name."""
    arguments = COMMAND.parse(argv)
    if folder := arguments.include_path:
        if not folder.is_dir():
            raise UserError(f"--include_path={folder}: there is no such folder")
    if file := arguments.output:
        if file.is_dir() or not os.access(file.parent, os.W_OK):
            raise UserError(f"--output={file}: no file can be written there")
    # lm_eval's pools fork, which with the threads of JAX may hang.
    os.environ["DISABLE_MULTIPROC"] = "1"
    with started(arguments) as model:
        # Before weights are read.
        tokenizer = _tokenizer(model, arguments.tokenizer)
        check_decoder(model.abstract(), f"--model={model.path}")
        shows, names = jax.process_index() == 0, arguments.tasks.split(",")
        tasks = load_tasks("--tasks", names, folder, shows=shows)

        from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]
        from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
            handle_non_serializable,
            make_table,
        )

        from jshard.inference.evaluate.language_model import (
            LanguageModel,
            read_gen_kwargs,
        )

        asked = arguments.gen_kwargs and read_gen_kwargs(arguments.gen_kwargs)
        placement = place_weights(model, arguments.weights, arguments.batch_size)
        results: Any = simple_evaluate(
            LanguageModel(placement, tokenizer, arguments.batch_size, shows=shows),
            tasks=tasks,
            num_fewshot=arguments.num_fewshot,
            limit=arguments.limit,
            batch_size=arguments.batch_size,
            apply_chat_template=arguments.apply_chat_template,
            fewshot_as_multiturn=arguments.apply_chat_template,
            gen_kwargs=asked,
            system_instruction=arguments.system_instruction,
            log_samples=arguments.log_samples,
            bootstrap_iters=_RESAMPLED * shows,
        )
        if not shows:
            return
        results["config"] |= {"model": "jshard", "model_args": str(model.path)}
        show(make_table(results))
        if "groups" in results:
            show(make_table(results, "groups"))
        if arguments.output is not None:
            text = json.dumps(
                results, indent=2, default=handle_non_serializable, ensure_ascii=False
            )
            replace_file(arguments.output, text + "\n")


def _tokenizer(model: TrainedModel, given: Path | None) -> Tokenizer:
    """Returns the model's tokenizer; a UserError if nothing says which it is."""
    named = is_huggingface(model.path) or model.text.tokenizer is not None
    if given is None and not named:
        raise UserError(
            f"--model={model.path}: the run's config names no data.tokenizer: give "
            "--tokenizer=DIR"
        )
    return model.tokenizer(given)


if __name__ == "__main__":
    main()
