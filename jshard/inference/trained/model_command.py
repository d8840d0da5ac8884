"""The command lines of what uses a trained model."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax

from jshard.inference.trained.trained_model import TrainedModel, open_model
from jshard.storage.hub.online.download import pin
from jshard.system.cli.machine.platform import (
    cache_compilations,
    choose_platform,
    start_devices,
)
from jshard.system.cli.options import STEP, Option
from jshard.system.cli.terminal import show
from jshard.system.jobs import cluster
from jshard.system.jobs.cluster import find_cluster
from jshard.system.jobs.job import join
from jshard.system.jobs.status import SILENCE
from jshard.system.jobs.supervisor import supervise

MODEL_OPTIONS = {
    "model": Option(
        None, "a run's folder, a checkpoint, or a Hugging Face folder or name",
        kind=Path, bucket=True, hub="model", required=True, shown="RUN_OR_DIR",
    ),
    "step": STEP,
    "config": Option(
        None, "the model's recipe, if it has moved", kind=str, shown="RECIPE",
    ),
    "tokenizer": Option(
        None, "the tokenizer; by default the run's, or the one in the Hugging Face "
        "folder", kind=Path, hub="model",
    ),
    "dtype": Option(
        None, "dtype of weights and computation; by default the run's own, and "
        "float32 for a Hugging Face folder", kind=str, choices=("float32", "bfloat16"),
    ),
    "ema": Option(
        False, "use the averages of the run's parameters (policy.ema_decay)"
    ),
    "base": Option(
        None, "the folder of the frozen weights of a run that trained adapters, if it "
        "has moved", kind=Path, hub="model", shown="DIR",
    ),
    "ignore": Option(
        None, "unknown keys of config.json that may be ignored, like a,b", kind=str,
        shown="KEYS",
    ),
    **cluster.OPTIONS,
}  # fmt: skip


@contextlib.contextmanager
def started(arguments: SimpleNamespace) -> Iterator[TrainedModel]:
    """Sets up JAX, joins the other processes of a job, and finds the model.

    Only process 0 should print.

    Args:
      arguments: the values of ``MODEL_OPTIONS``.

    Raises:
      UserError: There is no such model, or an argument is wrong.
    """
    job = find_cluster(vars(arguments))
    supervise(job)
    platform = choose_platform()
    cache_compilations()
    with contextlib.ExitStack() as stack:
        path = str(arguments.model)
        if job is not None:
            peers = stack.enter_context(join(job))
            peers.limit(SILENCE, 0)  # a long text is one phase
            path = peers.publish("model", pin(path) if peers.index == 0 else "")
        start_devices()
        if platform:
            note(platform)
        model = stack.enter_context(
            open_model(
                path,
                arguments.config,
                arguments.dtype,
                ema=arguments.ema,
                base=arguments.base,
                ignored=arguments.ignore or "",
                step=arguments.step,
            )
        )
        note(f"model: {model}")
        yield model


def note(text: str) -> None:
    """Prints a line on standard error, once for all processes."""
    if jax.process_index() == 0:
        show(f"jshard: {text}", error=True)
