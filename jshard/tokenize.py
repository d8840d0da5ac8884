"""Tokenizes text: `python -m jshard.tokenize PATH... --tokenizer=T --output=DIR`."""

import errno
import os

from jshard.cli.command import ArgumentParser, file_path, run_command, whole_number
from jshard.data.text.token_files import write_token_files
from jshard.errors import RunFailed, UserError


def main() -> None:
    """Runs the command line; exits 0 done, 2 bad input, 130 Ctrl-C, 1 anything else."""
    run_command(_tokenize)


def _tokenize(argv: list[str]) -> None:
    parser = ArgumentParser(
        prog="python -m jshard.tokenize",
        description="Turns text, JSONL or Parquet into token files for --config.data."
        "path. Killed and started again, it continues.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "inputs",
        metavar="PATH",
        nargs="+",
        type=file_path,
        help="a text file, .jsonl(.gz, .zst), .parquet, .arrow, or a folder of these; "
        "records are texts or chats",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        required=True,
        type=file_path,
        help="a tokenizer.json of Hugging Face's tokenizers, or a folder with one",
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        required=True,
        type=file_path,
        help="the folder to write to; new, or of the same command that did not finish",
    )
    parser.add_argument(
        "--text_key", default="text", help="the name of the text in a record"
    )
    parser.add_argument(
        "--workers",
        type=whole_number(1, 4096),
        default=len(os.sched_getaffinity(0)),
        help="processes; by default one a core",
    )
    arguments = parser.parse_args(argv)
    try:
        write_token_files(
            arguments.inputs,
            arguments.tokenizer,
            arguments.output,
            text_key=arguments.text_key,
            workers=arguments.workers,
        )
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunFailed(
                f"the disk of {arguments.output} is full; make room, and run the "
                "command again to continue"
            ) from error
        where = error.filename or arguments.output
        raise UserError(f"cannot tokenize: {where}: {error.strerror}") from error


if __name__ == "__main__":
    main()
