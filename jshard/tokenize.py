"""Tokenizes text: `python -m jshard.tokenize PATH... --tokenizer=T --output=DIR`.

With `--vocab_size=N` in place of `--tokenizer` it trains a tokenizer on the text.
"""

import os
from pathlib import Path
from typing import Any

from jshard.data.text.corpus import corpus_files
from jshard.data.text.encoded import texts_of
from jshard.data.text.token_writer import write_token_files
from jshard.data.tokenizers.bpe import train_tokenizer
from jshard.system.cli.command import run_command
from jshard.system.cli.options import Command, Option
from jshard.system.cli.paths import cache_folder, is_remote
from jshard.system.cli.terminal import show
from jshard.system.errors import RunFailed, UserError, is_disk_full

COMMAND = Command(
    "tokenize",
    "Turns text, JSONL or Parquet into token files for --config.data.path. If it is "
    "killed, the same command continues its work. With --vocab_size it trains a "
    "tokenizer instead.",
    {
        "PATH": Option(
            (), "a text file, .jsonl(.gz, .zst), .parquet, .arrow, or a folder of "
            "these; records are texts, chats or pairs", kind=Path, hub="dataset",
            bucket=True, required=True, repeats=True,
        ),
        "tokenizer": Option(
            None, "a tokenizer.json of Hugging Face's tokenizers, or a folder or "
            "Hugging Face name with one", kind=Path, hub="model",
        ),
        "output": Option(
            None, "the folder to write to: a new one, or that of the same command, "
            "unfinished", kind=Path, bucket=True, hub="dataset", required=True,
            shown="DIR",
        ),
        "vocab_size": Option(
            None, "train a byte-level BPE tokenizer with this many tokens on the text "
            "and write it to --output, for --config.data.tokenizer", kind=int,
            at_least=257, at_most=2**20,
        ),
        "text_key": Option("text", "the key or column of a record that holds its text"),
        "workers": Option(
            None, "number of processes; by default one per core", kind=int, at_least=1,
            at_most=4096,
        ),
    },
)  # fmt: skip


def main() -> None:
    """Runs the command line; exits 0 done, 2 bad input, 130 Ctrl-C, 1 anything else."""
    run_command(_tokenize)


def _tokenize(argv: list[str]) -> None:
    arguments = COMMAND.parse(argv)
    if (arguments.tokenizer is None) == (arguments.vocab_size is None):
        raise UserError(
            "give --tokenizer to write tokens, or --vocab_size to train a tokenizer"
        )
    try:
        if arguments.vocab_size:
            _train(arguments)
            return
        write_token_files(
            arguments.PATH,
            arguments.tokenizer,
            arguments.output,
            text_key=arguments.text_key,
            workers=arguments.workers or len(os.sched_getaffinity(0)),
        )
    except OSError as error:
        if is_disk_full(error):
            remote = is_remote(arguments.output)
            local = cache_folder("buckets") if remote else arguments.output
            raise RunFailed(
                f"the disk of {local} is full; make room, and run the "
                "command again to continue"
            ) from error
        where = error.filename or arguments.output
        raise UserError(f"cannot tokenize: {where}: {error.strerror}") from error


def _train(arguments: Any) -> None:
    output = arguments.output
    if is_remote(output):
        raise UserError(f"--output={output}: a tokenizer is written to a local folder")
    files = [file for path in arguments.PATH for file, _ in corpus_files(path)]
    texts = texts_of(files, arguments.text_key)
    size = train_tokenizer(texts, Path(output), arguments.vocab_size)
    show(f"{output} has a tokenizer of {size:,} tokens")
    show(
        f"train with it: --config.data.tokenizer={output} "
        f"--config.model.vocab_size={size}"
    )


if __name__ == "__main__":
    main()
