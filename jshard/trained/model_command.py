"""The command lines of what uses a trained model."""

import argparse
import contextlib
import sys
from collections.abc import Iterator

import jax

from jshard.cli.command import ArgumentParser, file_path
from jshard.cli.platform import cache_compilations, choose_platform
from jshard.cli.quiet import start_devices
from jshard.cli.terminal import show
from jshard.distributed import cluster, find_cluster, has_parent, join, supervise
from jshard.distributed.heartbeat import SILENCE
from jshard.trained.trained_model import TrainedModel, open_model


def model_parser(name: str, description: str) -> ArgumentParser:
    """Returns a parser with the arguments that ``started`` reads.

    Args:
      name: of the command, as in ``python -m jshard.generate``.
      description: what the command does.
    """
    parser = ArgumentParser(prog=name, description=description, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--model",
        metavar="RUN_OR_DIR",
        type=file_path,
        required=True,
        help="a run's folder, a checkpoint, or a Hugging Face folder",
    )
    add(
        "--config",
        metavar="RECIPE",
        help="the model's recipe, if it is not where the run says",
    )
    add(
        "--tokenizer",
        metavar="FILE_OR_FOLDER",
        type=file_path,
        help="by default the run's, or that in the Hugging Face folder",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of weights and computation; by default the run's own, and float32 for a "
        "Hugging Face folder",
    )
    add(
        "--ema",
        action="store_true",
        help="take the averages of the run's parameters (policy.ema_decay)",
    )
    add(
        "--base",
        metavar="DIR",
        type=file_path,
        help="where the weights are that a run of adapters did not train, if they have "
        "moved",
    )
    processes = parser.add_argument_group("several processes, as for jshard.train")
    for option in cluster.OPTIONS:
        processes.add_argument(f"--{option}", metavar="...")
    return parser


@contextlib.contextmanager
def started(arguments: argparse.Namespace) -> Iterator[TrainedModel]:
    """Sets up JAX, joins the other processes of a job, and finds the model.

    Only process 0 should print.

    Args:
      arguments: from ``model_parser``.

    Raises:
      UserError: There is no such model, or an argument is wrong.
    """
    given = {name: getattr(arguments, name) for name in cluster.OPTIONS}
    job = find_cluster({name: text for name, text in given.items() if text is not None})
    if job is not None and not has_parent():
        sys.exit(supervise(job, [sys.executable, *sys.orig_argv[1:]]))
    platform = choose_platform()
    cache_compilations()
    with contextlib.ExitStack() as stack:
        if job is not None:
            peers = stack.enter_context(join(job))
            peers.limit(SILENCE, 0)  # a long text is one phase
        start_devices()
        if platform:
            note(platform)
        model = stack.enter_context(
            open_model(
                arguments.model,
                arguments.config,
                arguments.dtype,
                ema=arguments.ema,
                base=arguments.base,
            )
        )
        note(f"model: {model}")
        yield model


def note(text: str) -> None:
    """Prints a line on standard error, once for all processes."""
    if jax.process_index() == 0:
        show(f"jshard: {text}", error=True)
