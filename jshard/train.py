"""Trains a recipe: `python -m jshard.train --config=gpt.py`.

Exit codes:
  0: The run is complete.
  1: The run failed: a loss that is not finite, a full disk, or a bug.
  2: Bad input; one line says what to do.
  75: A signal ended the run and its state is saved; the same command resumes it.
  130, 143: Ctrl-C or SIGTERM ended the process before anything could be saved.
"""

from pathlib import Path

from jshard.data.loader_processes import leave_to_run
from jshard.recipe.recipe_path import RECIPE_OPTIONS, find_recipe
from jshard.system.cli.command import run_command
from jshard.system.cli.options import Command, Option
from jshard.system.jobs import cluster
from jshard.system.jobs.supervisor import supervise

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


def main() -> None:
    """Runs the command line; exits with the codes above."""
    run_command(_train)


def _train(argv: list[str]) -> None:
    arguments = COMMAND.parse(argv)
    path = find_recipe(str(arguments.config))
    job = None if arguments.help else cluster.find_cluster(vars(arguments))
    supervise(job)
    from jshard.training.train_command import train  # slow; a parent needs none of it

    train(COMMAND, arguments, path, job)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # in a process that a data loader has spawned
    leave_to_run()
