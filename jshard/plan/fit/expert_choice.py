"""Chooses what a config leaves to the traffic: `mesh.expert`, with the value "fit".

Experts that devices share need no gathers, but tokens must travel to them and back. The
steps with each number of devices are traced, and the one whose collectives bring a
device the fewest bytes is taken: 1, where experts are gathered like any other weight,
if tokens are many and experts small.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core
from ml_collections import ConfigDict

from jshard.plan.fit.memory_choice import Candidate
from jshard.plan.start_up import traffic
from jshard.recipe.config.overrides import with_values
from jshard.recipe.config.settings import FIT, settings_of
from jshard.sharding.settings.mesh import EXPERT, hosts_of
from jshard.system.errors import UserError
from jshard.system.formatting import format_bytes


def with_experts(
    config: ConfigDict,
    devices: Sequence[Any],
    trace: Callable[[ConfigDict], tuple[core.Jaxpr, dict[str, int]]],
    hosts: Sequence[int] | None = None,
) -> tuple[ConfigDict, str]:
    """Returns the config with a number of devices that share experts, and the reason.

    Args:
      config: with every shared key; unless `mesh.expert` is "fit" it is returned as it
        is, with an empty reason.
      devices: of the run.
      trace: traces the step of a config; returns its jaxpr and the mesh's sizes.
      hosts: the host of each process, if known.

    Raises:
      UserError: No number is possible; says why two are not.
    """
    if settings_of(config).mesh.expert != FIT:
        return config, ""
    of_host = hosts_of(devices, hosts)
    most = min(of_host.count(host) for host in of_host)
    received: dict[int, int] = {}
    refused = ""
    for number in (n for n in range(1, most + 1) if most % n == 0):
        candidate = _with(config, number)
        # The choice by memory comes later, for this mesh.
        if settings_of(candidate).policy.open_keys:
            candidate = Candidate("full", 1).apply(candidate)
        try:
            jaxpr, sizes = trace(candidate)
        except UserError as error:
            refused = refused or str(error)
            continue
        received[number] = sum(x.wire_bytes for x in traffic(jaxpr, sizes).values())
    if not received or (len(received) == 1 and most > 1):
        raise UserError(f"mesh.expert={FIT}: there is nothing to choose: {refused}")
    chosen = min(received, key=lambda number: received[number])
    others = ", ".join(
        f"{number}: {format_bytes(size)}"
        for number, size in received.items()
        if number != chosen
    )
    text = f"{EXPERT} {chosen}, which moves the fewest bytes a device and step: "
    text += f"{format_bytes(received[chosen])} (of {others})"
    return _with(config, chosen), text if others else ""


def _with(config: ConfigDict, number: int) -> ConfigDict:
    return with_values(config, {"mesh.expert": number})
