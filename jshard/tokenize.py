"""Tokenizes text: `python -m jshard.tokenize PATH... --tokenizer=T --output=DIR`."""

import os
from pathlib import Path

from jshard.cli.command import run_command
from jshard.cli.options import Command, Option
from jshard.cli.paths import cache_folder, is_remote
from jshard.data.text.token_writer import write_token_files
from jshard.errors import RunFailed, UserError, is_disk_full

COMMAND = Command(
    "tokenize",
    "Turns text, JSONL or Parquet into token files for --config.data.path. Killed and "
    "started again, it continues.",
    {
        "PATH": Option(
            (), "a text file, .jsonl(.gz, .zst), .parquet, .arrow, or a folder of "
            "these; records are texts or chats", kind=Path, hub="dataset",
            bucket=True, required=True, repeats=True,
        ),
        "tokenizer": Option(
            None, "a tokenizer.json of Hugging Face's tokenizers, or a folder or "
            "Hugging Face name with one", kind=Path, hub="model", required=True,
        ),
        "output": Option(
            None, "the folder to write to; new, or of the same command that did not "
            "finish", kind=Path, bucket=True, hub="dataset", required=True, shown="DIR",
        ),
        "text_key": Option("text", "the name of the text in a record"),
        "workers": Option(
            None, "processes; by default one a core", kind=int, at_least=1,
            at_most=4096,
        ),
    },
)  # fmt: skip


def main() -> None:
    """Runs the command line; exits 0 done, 2 bad input, 130 Ctrl-C, 1 anything else."""
    run_command(_tokenize)


def _tokenize(argv: list[str]) -> None:
    arguments = COMMAND.parse(argv)
    try:
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


if __name__ == "__main__":
    main()
