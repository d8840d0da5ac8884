"""Trains a recipe: `python -m jshard.train --config=gpt.py`.

Exit codes:
  0: The run is complete.
  1: The run failed: a loss that is not finite, a full disk, or a bug.
  2: Bad input; one line says what to do.
  75: A signal ended the run and its state is saved; the same command resumes it.
  130, 143: Ctrl-C or SIGTERM ended the process before anything could be saved.
"""

import json
import os
import sys
import time
from pathlib import Path

from jshard.cli.command import run_command
from jshard.cli.options import Command, Option
from jshard.cli.platform import (
    cache_compilations,
    choose_platform,
    limit_collectives,
    make_cpu_devices,
)
from jshard.cli.quiet import start_devices
from jshard.cli.terminal import show
from jshard.config.overrides import RECIPE_OPTIONS, keys_help
from jshard.config.run_config import complete
from jshard.data.loader_processes import leave_to_run
from jshard.distributed import cluster, find_cluster, has_parent, join, supervise
from jshard.recipe.load import find_recipe, open_recipe
from jshard.recipe.make_config import make_config, pin_words, read_keys
from jshard.run.bucket import open_workdir

COMMAND = Command(
    "train",
    "Trains the model of a recipe, fully sharded over all devices.",
    {
        **RECIPE_OPTIONS,
        "workdir": Option(
            None, "the run's folder, or s3://BUCKET/PATH or gs://BUCKET/PATH; by "
            "default runs/RECIPE-DATE-TIME", kind=Path, shown="DIR", bucket=True,
        ),
        **cluster.OPTIONS,
    },
    notes=(
        "Several processes train together if SLURM, Open MPI or Kubernetes started "
        "them, or if each is started with the same command and its --process_id "
        "(docs/cluster; python -m jshard.launch does that).",
    ),
)  # fmt: skip
_IMPORTED = time.time()


def main() -> None:
    """Runs the command line; exits with the codes above."""
    run_command(_train)


def _train(argv: list[str]) -> None:
    arguments = COMMAND.parse(argv)
    path = find_recipe(str(arguments.config))
    job = None if arguments.help else find_cluster(vars(arguments))
    if job is not None and not has_parent():
        sys.exit(supervise(job, [sys.executable, *sys.orig_argv[1:]]))
    platform = choose_platform()
    started, joining = _process_start(), time.time()
    with join(job) as peers, open_recipe(path) as recipe:
        joined = time.time()
        if arguments.help:
            config = complete(recipe.get_config(), recipe.name)
            show(f"{COMMAND.help()}\n{keys_help(config, recipe.name)}", end="")
            return
        if platform and peers.index == 0:
            show(f"jshard: {platform}", error=True)
        folder, bucket = open_workdir(arguments.workdir)
        words = arguments.config_keys
        names = pin_words(recipe, words, folder) if peers.index == 0 else {}
        words |= json.loads(peers.publish("names", json.dumps(names)))
        keys = read_keys(recipe, words, folder)
        config = make_config(recipe, keys, folder)
        make_cpu_devices(config.mesh.cpu_devices)
        stuck = config.watch.stuck
        limit_collectives(None if stuck == "auto" else stuck)
        several = len(set(peers.hosts)) > 1
        cache_compilations(folder if several and bucket is None else None)
        starting = time.time()
        start_devices()
        waited = {"joining": joined - joining} if peers.count > 1 else {}
        waited["devices"] = time.time() - starting
        # A slow import, left until the mistakes above have been reported.
        from jshard.training.trainer import Trainer

        trainer = Trainer(recipe, config=config, workdir=bucket or folder, peers=peers)
        waited["imports"] = time.time() - started - sum(waited.values())
        trainer.fit(started=started, waited=waited, keeps_state=False)


def _process_start() -> float:
    """Returns the start time of this process, on the clock of `time.time()`."""
    try:
        # The 22nd field is the start time, in ticks since boot. The second, the name,
        # may contain spaces.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[19])
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
        age = since_boot - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # not Linux
        return _IMPORTED
    return time.time() - age


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # in a process that a data loader has spawned
    leave_to_run()
