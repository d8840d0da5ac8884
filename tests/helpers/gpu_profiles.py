"""Profiles of GPUs as JAX writes them, made of a replayed step."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jax.profiler import ProfileData

PS = 10**12


class Kernel(NamedTuple):
    """A kernel, a collective or a copy."""

    stream: str
    name: str  # of its instruction; "" of a kernel in a command buffer
    start: float  # seconds
    end: float


def write_profile(
    folder: Path,
    devices: Mapping[int, Sequence[Kernel]],
    host: Sequence[tuple[str, float, float]] = (),
    module: str = "step",
) -> Path:
    """Writes a profile of one host.

    Args:
      folder: that of the profile.
      devices: what ran, by number of the GPU.
      host: (name, start, end) of what Python did.
      module: the program's name.
    """
    planes = [_device(number, ran, module) for number, ran in devices.items()]
    names = {name: i for i, (name, *_) in enumerate(host, 1)}
    planes.append(
        'planes { name: "/host:CPU" '
        + _metadata(names)
        + 'lines { name: "python" '
        + "".join(_event(names[name], start, end) for name, start, end in host)
        + "} }"
    )
    data = ProfileData.text_proto_to_serialized_xspace("\n".join(planes))
    path = folder / "plugins" / "profile" / "2026_11_27" / "host.xplane.pb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return folder


def _device(number: int, ran: Sequence[Kernel], module: str) -> str:
    names = {name: i for i, name in enumerate({x.name for x in ran}, 1)}
    lines = []
    for stream in dict.fromkeys(x.stream for x in ran):
        events = "".join(
            _event(
                names[x.name],
                x.start,
                x.end,
                f'stats {{ metadata_id: 1 str_value: "{x.name}" }} '
                f'stats {{ metadata_id: 2 str_value: "{module}" }}'
                if x.name
                else "stats { metadata_id: 3 int64_value: 7 }",
            )
            for x in ran
            if x.stream == stream
        )
        lines.append(f'lines {{ name: "Stream #{len(lines)}({stream})" {events} }}')
    summed = "".join(_event(1, x.start, x.end) for x in ran)
    lines.append(f'lines {{ name: "XLA Ops" {summed} }}')
    stats = "".join(
        f'stat_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }} '
        for i, name in enumerate(("hlo_op", "hlo_module", "cuda_graph_id"), 1)
    )
    kernels = {f"kernel of {name}": i for name, i in names.items()}
    return (
        f'planes {{ name: "/device:GPU:{number}" {_metadata(kernels)} {stats} '
        + " ".join(lines)
        + "}"
    )


def _metadata(names: Mapping[str, int]) -> str:
    return "".join(
        f'event_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }} '
        for name, i in names.items()
    )


def _event(number: int, start: float, end: float, stats: str = "") -> str:
    begin = round(start * PS)
    return (
        f"events {{ metadata_id: {number} offset_ps: {begin} "
        f"duration_ps: {round(end * PS) - begin} {stats} }} "
    )
