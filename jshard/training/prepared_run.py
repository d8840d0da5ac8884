"""A recipe on its mesh, and the state: what fit, evaluate and predict share."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jshard.data.batches import Batch
from jshard.data.position import position_files, read_position
from jshard.data.stream_reader import StreamState
from jshard.data.stream_state import read_state, state_files
from jshard.plan.fit.fitted import fitted_on, make_fitted_job
from jshard.recipe import contract
from jshard.recipe.build import Job, make_job, make_mesh
from jshard.recipe.config.settings import RunSettings
from jshard.recipe.configured import Configured
from jshard.recipe.source import Source, find_source
from jshard.sharding.layout.batch import rows_of_process
from jshard.sharding.layout.capacity import check_capacity
from jshard.sharding.settings.policy import Policy
from jshard.sharding.settings.state import TrainState
from jshard.storage.checkpoint.local import LocalCopies
from jshard.storage.checkpoint.restore import find_step
from jshard.storage.checkpoint.selected.run_address import find_run
from jshard.system.jobs.peers import Peers
from jshard.training.agreement import agree, facts_of_jax, share_secret
from jshard.training.precomputed import Precomputed
from jshard.training.run.bucket import RunInBucket
from jshard.training.run.start import Start, find_start


@dataclasses.dataclass
class PreparedRun:
    """A run before, between and after its steps.

    Attributes:
      job: The recipe on its mesh; its config has no open keys.
      abstract_state: The state, as `ShapeDtypeStruct`s.
      workdir: The run's folder.
      peers: The processes that train together.
      chosen: What was chosen by memory and why; empty if nothing was open.
      hosts: The host of each process, if known.
      bucket: The run in a bucket, of which the folder is a copy.
      copies: Of the state on the hosts, if `checkpoint.local` asks for them.
      state: The newest state; None before there is one. A step that fails takes the
        state with it, and leaves deleted arrays.
      stream_state: Where the training data are after the step of `state`, if they are a
        stream with a state.
      examples: How many examples of the training data the steps up to `state` read.
      precomputed: What the recipe computed before the first step; None if it does not,
        or if nothing was read yet.
    """

    job: Job
    abstract_state: TrainState
    workdir: Path
    peers: Peers
    chosen: str
    hosts: Sequence[int] | None
    bucket: RunInBucket | None = None
    copies: LocalCopies | None = None
    state: Any = None
    stream_state: StreamState | None = None
    examples: int = 0
    precomputed: Precomputed | None = None

    @property
    def settings(self) -> RunSettings:
        """What the run is, besides its recipe's own keys."""
        return self.job.configured.settings

    @property
    def shown(self) -> str:
        """The run's folder as the user gave it."""
        return self.bucket.url if self.bucket else str(self.workdir)

    @property
    def fitted_on(self) -> str:
        """The devices for which keys were chosen; empty if none were."""
        return fitted_on(self.job.fsdp.mesh) if self.chosen else ""

    def alive(self) -> bool:
        """Returns whether there is a state to go on from."""
        leaves = jax.tree.leaves(self.state)
        return bool(leaves) and not any(x.is_deleted() for x in leaves)

    def find_start(self) -> Start:
        """Finds where the run starts, without writing anything."""
        held = int(self.state.step) if self.alive() else None
        if self.bucket is not None:
            self.bucket.refresh()
        return find_start(
            self.workdir,
            self.settings,
            self.job.configured.recorded,
            self.peers,
            self.abstract_state,
            held,
            shown=self.shown,
            copies=self.copies,
        )

    def claim(self) -> bool:
        """Settles which run saves in a bucket, before this one reads its checkpoint.

        Returns whether another run has saved or deleted steps meanwhile.
        """
        if self.bucket is None or not self.settings.checkpoint.every:
            return False
        changed = self.peers.index == 0 and self.bucket.claim()
        return bool(self.peers.publish("claimed", "changed" * changed))

    def restore(self, start: Start) -> Source:
        """Makes `state` that of `start`, unless it is at hand; None for a new run.

        Returns where a new run's parameters come from.
        """
        source = find_source(self.job, self.abstract_state, start.checkpoint)
        if start.held:
            return source
        self.state = None  # never two at once
        self.examples = start.examples
        if start.local:
            assert self.copies is not None
            self.peers.at("restoring", start.step)
            self.state = self.copies.restore(start.step)
        elif start.checkpoint:
            self.peers.at("restoring", start.step)
            self.state = source.restore(self.abstract_state)
        return source

    def take(self, step: str | int) -> None:
        """Makes `state` that of a checkpoint of the run: best, newest or a number.

        Raises:
          UserError: There is no such checkpoint, or it is damaged.
        """
        if self.bucket is not None:
            self.bucket.refresh()
        folder = find_step(find_run(self.workdir, step))
        source = find_source(self.job, self.abstract_state, folder)
        self.state = None  # never two at once
        self.state = source.restore(self.abstract_state)
        number = int(folder.stem)  # the name may have a suffix
        self.examples = read_position(folder, number, self.settings.batch_size)
        self.stream_state = read_state(folder)

    def train_step(
        self, step: int, batch: Batch, compute: Callable[..., Any] | None = None
    ) -> Mapping[str, jax.Array]:
        """Trains on this process's part of a batch; does not wait for the devices.

        Returns the metrics of the step. `compute` takes the place of the job's step;
        if it raises, the state stays.
        """
        with jax.profiler.StepTraceAnnotation("step", step_num=step):
            sharded = self.job.fsdp.shard_batch(self.filled(batch.rows))
            train_step = compute or self.job.train_step
            self.state, metrics = train_step(self.state, sharded)
        self.stream_state = batch.state
        self.examples += self.settings.batch_size
        return metrics

    def filled(self, rows: Any) -> Any:
        """Returns rows of a batch with what was computed for them once, if anything."""
        configured = self.job.configured
        if contract.precompute(configured.recipe.precompute, configured.config) is None:
            return rows
        if self.precomputed is None:
            self.precomputed = Precomputed.read(self.workdir)
        return self.precomputed.fill(rows)

    def files_to_save(self) -> dict[str, str]:
        """Returns what a checkpoint of `state` stores beside it: texts by file name.

        All processes call it after the same step, and get the same.
        """
        return position_files(self.examples) | state_files(self.stream_state)

    def reader(self) -> dict[str, int]:
        """Returns the arguments of `batches` that select this process's part."""
        # A process reads the rows of its devices' place in the mesh.
        part, parts = rows_of_process(self.job.fsdp.mesh)
        size = self.settings.batch_size
        return {"batch_size": size, "process_index": part, "process_count": parts}


def prepare_run(
    configured: Configured,
    workdir: Path,
    peers: Peers,
    mesh: Mesh | None = None,
    policy: Policy | None = None,
    bucket: RunInBucket | None = None,
) -> PreparedRun:
    """Prepares a run; nothing is allocated or written.

    Mesh and policy are those of the config, unless others are given. All processes call
    it.

    Raises:
      UserError: The config asks for something impossible.
    """
    settings = configured.settings
    peers.limit(settings.watch.silence, settings.watch.limit)
    peers.open_log(workdir)
    peers.at("setting up", 0)
    if peers.count > 1:
        agree(peers, facts_of_jax())
    hosts = peers.hosts if peers.count > 1 else None
    if mesh is None:
        mesh = make_mesh(settings.mesh, hosts=hosts)
    if policy is not None:
        job, chosen = make_job(configured, mesh, policy), ""
    else:
        job, chosen = make_fitted_job(configured, mesh, hosts, workdir, peers)
    state = job.abstract_state()
    check_capacity(state, job.fsdp.mesh.local_devices)
    copies = None
    if settings.checkpoint.local:
        root = Path(settings.checkpoint.local_dir).expanduser()
        # A run in a bucket has a new local folder on each start.
        name = bucket.url if bucket else str(workdir.absolute())
        secret = share_secret(peers, workdir / "logs")
        copies = LocalCopies(root, name, state, peers, secret)
    return PreparedRun(job, state, workdir, peers, chosen, hosts, bucket, copies)
