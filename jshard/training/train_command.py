"""What a process of `python -m jshard.train` does, alone or as a worker of a job."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

from jshard.recipe.config.overrides import keys_help
from jshard.recipe.config.run_config import complete
from jshard.recipe.configured import configure
from jshard.recipe.load import open_recipe
from jshard.recipe.make_config import make_config, pin_words, read_keys
from jshard.recipe.schedule.epochs import set_epochs, take_epochs
from jshard.system.cli.machine.platform import (
    add_in_order,
    cache_compilations,
    choose_platform,
    limit_collectives,
    make_cpu_devices,
    start_devices,
)
from jshard.system.cli.options import Command
from jshard.system.cli.terminal import show
from jshard.system.jobs.cluster import Cluster
from jshard.system.jobs.job import join
from jshard.training.run.bucket import open_workdir

_IMPORTED = time.time()


def train(
    command: Command, arguments: SimpleNamespace, path: str, job: Cluster | None
) -> None:
    """Trains the recipe at ``path``, or shows the help of ``command`` with its keys."""
    platform = choose_platform()
    started, joining = _process_start(), time.time()
    with join(job) as peers, open_recipe(path) as recipe:
        joined = time.time()
        if arguments.help:
            config = complete(recipe.get_config(), recipe.name)
            show(f"{command.help()}\n{keys_help(config, recipe.name)}", end="")
            return
        if platform and peers.index == 0:
            show(f"jshard: {platform}", error=True)
        folder, bucket = open_workdir(arguments.workdir)
        words, epochs = take_epochs(arguments.config_keys, recipe)
        names = pin_words(recipe, words, folder) if peers.index == 0 else {}
        words |= json.loads(peers.publish("names", json.dumps(names)))
        keys = read_keys(recipe, words, folder)
        config = make_config(recipe, keys, folder)
        settings = configure(recipe, config).settings
        make_cpu_devices(settings.mesh.cpu_devices)
        limit_collectives(settings.watch.limit)
        if settings.deterministic:
            add_in_order()
        several = len(set(peers.hosts)) > 1
        shared = folder if several and bucket is None else None
        first = peers.hosts.index(peers.hosts[peers.index])  # process of this host
        cache_compilations(shared, writes=first == peers.index)
        starting = time.time()
        start_devices()
        waited = {"joining": joined - joining} if peers.count > 1 else {}
        waited["devices"] = time.time() - starting
        # A slow import, left until the mistakes above have been reported.
        from jshard.training.trainer import Trainer, fit_since

        set_epochs(recipe, config, epochs)
        trainer = Trainer(recipe, config=config, workdir=bucket or folder, peers=peers)
        waited["imports"] = time.time() - started - sum(waited.values())
        fit_since(trainer, started, waited, keeps_state=False)


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
