"""The command `jshard.generate`: continues prompts, or answers them.

It is not in jshard/generate.py, which nothing may import: that would put a module in
place of the function ``jshard.generate``.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jshard.data.tokenizers.tokenizer import Tokenizer
from jshard.inference.generation import Generator, Sampling
from jshard.inference.generation.decoding import NOTHING
from jshard.inference.generation.prompts import check_prompts, is_encoder_decoder
from jshard.inference.trained.model_command import MODEL_OPTIONS, started
from jshard.inference.trained.weight_option import WEIGHTS, place_weights
from jshard.system.cli.command import read_text, run_command
from jshard.system.cli.options import Command, Option
from jshard.system.cli.terminal import show
from jshard.system.errors import UserError
from jshard.system.files.untrusted import parse_json
from jshard.system.formatting import printable

_COUNT: dict[str, Any] = {"at_least": 1, "at_most": 10**9}
_TOKEN: dict[str, Any] = {"at_least": 0, "at_most": 2**31 - 1}
COMMAND = Command(
    "generate",
    "Continues prompts with a trained model.",
    {
        **MODEL_OPTIONS,
        "prompt": Option(
            None, "is printed, followed by its continuation as it is generated",
            kind=str,
        ),
        "prompts": Option(
            None,
            "a file with one prompt per line, or a .jsonl file with one "
            '{"prompt": TEXT} per line',
            kind=Path,
            shown="FILE",
        ),
        "length": Option(128, "the most tokens to generate for each prompt", **_COUNT),
        "temperature": Option(0.8, "of sampling; 0 always takes the likeliest token"),
        "top_k": Option(
            0, "sample only from the N likeliest tokens; 0 is all", **_TOKEN
        ),
        "top_p": Option(1.0, "sample from the likeliest tokens up to probability N"),
        "seed": Option(
            0, "seed of sampling; the prompt on line r has seed N + r",
            at_least=0, at_most=2**32 - 1,
        ),
        "batch_size": Option(32, "number of prompts to generate for at once", **_COUNT),
        "stop_token": Option(
            (),
            "a token that ends a text, in addition to the tokenizer's; may be given "
            "several times",
            kind=int, repeats=True, shown="ID", **_TOKEN,
        ),
        "format": Option(
            "text", "print text, or one JSON object per prompt",
            choices=("text", "jsonl"),
        ),
        "weights": WEIGHTS,
    },
)  # fmt: skip


def main() -> None:
    """Runs the command line; exits 0 done, 2 bad input, 130 Ctrl-C, 1 anything else."""
    run_command(run_generate)


def run_generate(argv: list[str]) -> None:
    """Continues the prompts that the arguments name."""
    arguments = COMMAND.parse(argv)
    if (arguments.prompt is None) == (arguments.prompts is None):
        raise UserError("give one of --prompt=TEXT and --prompts=FILE")
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    prompts = [arguments.prompt]
    if arguments.prompts is not None:
        prompts = read_prompts(arguments.prompts)
    with started(arguments) as model:
        tokenizer = model.tokenizer(arguments.tokenizer)
        tokens = [tokenizer.encode(prompt) for prompt in prompts]
        # Before weights are read, and anything is printed.
        abstract = model.abstract()
        check_prompts(abstract, tokens, arguments.length)
        answers = is_encoder_decoder(abstract)
        placement = place_weights(model, arguments.weights, len(prompts))
        generator = Generator.at(placement)
        options = {
            "length": arguments.length,
            "sampling": sampling,
            "stop_tokens": (*tokenizer.stop_ids, *arguments.stop_token),
        }
        if arguments.prompt is not None and arguments.format == "text":
            (only,) = tokens
            stream = generator.stream([only], **options, seed=arguments.seed, chunk=1)
            if answers:
                only = only[:0]
            else:
                _print(arguments.prompt)
            for text in texts_of(tokenizer, only, stream):
                _print(text)
            _print("\n")
            return
        for start in range(0, len(tokens), arguments.batch_size):
            part = tokens[start : start + arguments.batch_size]
            found = generator(part, **options, seed=arguments.seed + start)
            for prompt, before, after in zip(
                prompts[start:], part, found, strict=False
            ):
                text = continuation(tokenizer, before[:0] if answers else before, after)
                if arguments.format == "jsonl":
                    entry = {"prompt": prompt, "text": text, "tokens": after}
                    _print(f"{_json(entry)}\n")
                elif answers:
                    _print(f"{text}\n")
                else:
                    _print(f"{prompt}{text}\n\n")


def read_prompts(file: Path) -> list[str]:
    """Reads the prompts of a file: its lines, or those of a .jsonl file.

    Raises:
      UserError: The file cannot be read, or a line is not a prompt.
    """
    lines = read_text("--prompts", file).splitlines()
    if not lines:
        raise UserError(f"--prompts={file}: has no prompts")
    prompts = []
    for number, line in enumerate(lines, 1):
        prompt: Any = line
        if file.suffix == ".jsonl":
            try:
                prompt = parse_json(line)
            except ValueError as error:
                raise UserError(f"{file}:{number}: not JSON: {error}") from error
            prompt = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        if not isinstance(prompt, str) or not prompt:
            raise UserError(f"{file}:{number}: expected a prompt, got {line[:60]!r}")
        prompts.append(prompt)
    return prompts


def texts_of(
    tokenizer: Tokenizer, prompt: np.ndarray, parts: Iterator[np.ndarray]
) -> Iterator[str]:
    """Yields the text of a continuation as it grows, whole characters only."""
    tokens, shown = [], 0
    for part in parts:
        tokens += part[0][part[0] != NOTHING].tolist()
        text = continuation(tokenizer, prompt, tokens)
        if text.endswith("�"):
            continue  # its other bytes may follow
        yield text[shown:]
        shown = len(text)
    yield continuation(tokenizer, prompt, tokens)[shown:]


def continuation(tokenizer: Tokenizer, prompt: np.ndarray, tokens: list[int]) -> str:
    """Returns the text that tokens add to a prompt's, spaces included."""
    before = tokenizer.decode(prompt)
    whole = tokenizer.decode(np.concatenate([prompt, np.asarray(tokens, np.int32)]))
    return whole[len(before) :]


def _json(entry: dict[str, Any]) -> str:
    """Returns JSON with letters as they are, and escaped what terminals act on."""
    text = json.dumps(entry, ensure_ascii=False)
    return "".join(c if printable(c) == c else json.dumps(c)[1:-1] for c in text)


def _print(text: str) -> None:
    if jax.process_index() == 0:  # the others have the same text
        show(text, end="")
