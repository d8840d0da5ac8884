"""A pipeline in a compiled program: what each stage does in each tick.

All devices run one program. Its loop over ticks has a conditional, by which a device
takes the branch that the schedule has for its stage, and in these are conditionals of
what the first and the last stage alone do. So the schedule says which instructions a
device runs; the compiled program says how long each takes.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jshard.plan.hlo import Instruction, Module
from jshard.sharding.pipeline.schedule import (
    BACKWARD,
    FORWARD,
    IDLE,
    Schedule,
    one_forward_one_backward,
)
from jshard.sharding.settings.mesh import REPLICA, stages_of
from jshard.sharding.settings.policy import Policy
from jshard.sharding.settings.scopes import FIRST_STAGE, LAST_STAGE, SCHEDULE

_SWITCH = re.compile(SCHEDULE.format(*[r"\d+"] * 3) + "/cond$")


class Cell(NamedTuple):
    """What a device does in one tick."""

    device: int  # of the pipeline
    start: float  # seconds since the step began
    end: float  # likewise
    does: int  # as of ``Schedule``
    micro: int  # with which micro-batch
    chunk: int  # with which of the device's stages

    @property
    def way(self) -> str:
        """Returns "forward", "backward", or "" if it is idle."""
        ways = {FORWARD: "forward"}
        return "backward" if self.does >= BACKWARD else ways.get(self.does, "")


class Pipeline:
    """The stages of a mesh.

    Attributes:
      does: what each device does in each tick, (ticks, devices), as of ``Schedule``.
      micro: with which micro-batch, likewise.
      chunk: with which of its stages, likewise.
      number: of devices that a micro-batch passes.
      size: devices in a row that share a stage.
    """

    def __init__(self, schedule: Schedule, size: int):
        self.does, self.micro, self.size = schedule.does, schedule.micro, size
        self.chunk = schedule.chunk
        self.number = self.does.shape[1]

    def cell(self, device: int, tick: int, start: float, end: float) -> Cell:
        """Returns what a device does in a tick that lasts from start to end."""
        tables = (self.does, self.micro, self.chunk)
        return Cell(device, start, end, *(int(x[tick, device]) for x in tables))

    def branches(self, x: Instruction, device: int, tick: int) -> Sequence[str]:
        """Returns the computations of a conditional that a device runs in a tick.

        These are all of them if it is none of the pipeline's.
        """
        if is_switch(x):
            return [x.called["branch_computations"][self.does[tick, device]]]
        mine = self._mine(x, device)
        if mine is None:
            return [name for names in x.called.values() for name in names]
        return [_choices(x)[int(mine[tick])]]

    def shares(self, x: Instruction, device: int) -> Iterator[tuple[str, float]]:
        """Yields the computations of a conditional, and how often a device runs them.

        As a part of all ticks; within a tick, of those in which it works.
        """
        if is_switch(x):
            for does, name in enumerate(x.called["branch_computations"]):
                yield name, float(np.mean(self.does[:, device] == does))
            return
        mine = self._mine(x, device)
        if mine is None:
            yield from ((name, 1.0) for name in self.branches(x, device, 0))
            return
        share = float(np.mean(mine[self.does[:, device] != IDLE]))
        yield from zip(_choices(x), (1 - share, share), strict=True)

    def _mine(self, x: Instruction, device: int) -> np.ndarray | None:
        """Returns in which ticks a conditional of one stage is that of the device's."""
        *_, scope, name = ("", *x.source.split("/"))
        chunk = self.chunk[:, device]
        if name == "cond" and scope == FIRST_STAGE:
            return (chunk == 0) & (device == 0)
        if name == "cond" and scope == LAST_STAGE:
            return (chunk == self.chunk.max()) & (device == self.number - 1)
        return None

    @property
    def parts(self) -> int:
        """The ticks of a backward."""
        return int(self.does.max()) - FORWARD

    @property
    def bubble(self) -> float:
        """The part of its ticks in which a device is idle, by the schedule alone."""
        return float(np.mean(self.does == IDLE))

    @property
    def alive(self) -> list[int]:
        """How many stages' activations of a micro-batch each device keeps at most."""
        began, ended = self.does == FORWARD, self.does == FORWARD + self.parts
        before = np.cumsum(began, axis=0) - np.cumsum(ended, axis=0) + ended
        return [int(most) for most in before.max(axis=0)]

    def partners(
        self, groups: Sequence[Sequence[int]]
    ) -> tuple[tuple[int, ...], ...] | None:
        """Returns which stages wait for each other in a collective, for each of them.

        None if each has it to itself.
        """
        found = [{stage} for stage in range(self.number)]
        for group in groups:
            stages = {device // self.size % self.number for device in group}
            for stage in stages:
                found[stage] |= stages
        if all(len(stages) == 1 for stages in found):
            return None
        return tuple(map(tuple, found))


def _choices(x: Instruction) -> tuple[str, ...]:
    """Returns the computations for false and for true; CPUs number them."""
    if "branch_computations" in x.called:
        return x.called["branch_computations"]
    return (*x.called["false_computation"], *x.called["true_computation"])


def is_switch(x: Instruction) -> bool:
    """Returns whether a conditional is that of a pipeline's ticks."""
    return x.opcode == "conditional" and bool(_SWITCH.search(x.source))


def pipeline_of(
    module: Module, mesh: Mesh | AbstractMesh, policy: Policy
) -> Pipeline | None:
    """Returns the pipeline of a compiled step; None without stages.

    Raises:
      ValueError: the program has no schedule, or another one than its mesh.
    """
    if (number := stages_of(mesh)) == 1:
        return None
    switches = list(filter(is_switch, module.instructions.values()))
    if not switches:
        raise ValueError("the program has no ticks of a pipeline")
    parts = len(switches[0].called["branch_computations"]) - BACKWARD
    micro, per_device = policy.accumulate, policy.stages_per_device
    schedule = one_forward_one_backward(number, micro, parts, per_device)
    scope = SCHEDULE.format(micro, per_device, len(schedule.does))
    if scope not in switches[0].source:
        raise ValueError(f"{scope}: not the schedule of {switches[0].source}")
    return Pipeline(schedule, mesh.size // (mesh.shape[REPLICA] * number))
