"""A plan as JSON, and as a trace for ui.perfetto.dev.

docs/plan.md has the schemas.
"""

import dataclasses
from typing import Any

from jshard.plan.cost.assumptions import assumptions
from jshard.plan.cost.phases import Phases
from jshard.plan.cost.streams import STREAMS, Event
from jshard.plan.cost.ticks import Pipeline
from jshard.plan.cost.timeline import Timeline
from jshard.plan.fit.hardware import FITTED
from jshard.plan.output.plan_text import options
from jshard.plan.planning import Plan, RecipePlan
from jshard.system.compat.versions import versions

SCHEMA = 2


def as_json(plan: Plan) -> dict[str, Any]:
    """Returns the plan without events and program, in bytes, seconds and FLOP/s."""
    traffic = plan.traffic
    return {
        "schema": SCHEMA,
        "versions": versions(("jax", "jaxlib", "flax", "optax")),
        "name": plan.name,
        **_of_recipe(plan),
        "topology": plan.topology,
        "gpu": None if plan.gpu is None else dataclasses.asdict(plan.gpu),
        "devices": plan.devices,
        "notes": list(plan.notes),
        "fits": plan.fits,
        "memory": plan.memory.as_dict(),
        "traffic": {
            "bytes": traffic.bytes,
            "network_bytes": traffic.network_bytes,
            "least_bytes": traffic.least_bytes,
            "rows": list(map(dataclasses.asdict, traffic.rows)),
            "least": [
                {"kind": kind, "dtype": dtype, "bytes": size}
                for (kind, dtype), size in traffic.least.items()
            ],
        },
        "pipeline": None if plan.pipeline is None else _pipeline(plan, plan.pipeline),
        "timeline": None if plan.timeline is None else _timeline(plan, plan.timeline),
        "options": [
            {"name": name, "value": value, "reason": reason}
            for name, value, reason in options(plan)
        ],
        "model": assumptions(plan.gpu.constants if plan.gpu else FITTED),
    }


def _of_recipe(plan: Plan) -> dict[str, Any]:
    names = ("recipe", "config", "mesh", "batch", "compile_seconds")
    if not isinstance(plan, RecipePlan):
        return dict.fromkeys(names)
    program = plan.program
    batch = {"items": program.items, "unit": program.unit}
    config, mesh = program.job.configured.values, dict(program.mesh.shape)
    found = (program.recipe.name, config, mesh, batch, plan.seconds)
    return dict(zip(names, found, strict=True))


def _pipeline(plan: Plan, pipeline: Pipeline) -> dict[str, Any]:
    found = {
        "stages": pipeline.number,
        "ticks": len(pipeline.does),
        "scheduled_bubble": pipeline.bubble,
        "activations": pipeline.alive,
    }
    if plan.timeline is None:
        return found
    timeline = plan.timeline
    return found | {
        "bubble": timeline.bubble,
        "idle": list(timeline.idle),
        "shown": timeline.stage,
        "exposed_sends": timeline.exposed_sends,
        "cells": list(timeline.cells),
    }


def _timeline(plan: Plan, timeline: Timeline) -> dict[str, Any]:
    phases = Phases(timeline)
    per_second = plan.items_per_second

    def event(x: Event | None) -> dict[str, Any] | None:
        return x and {
            "name": x.name,
            "kind": x.kind,
            "phase": phases.of(x),
            "source": x.source,
            "bytes": x.bytes,
        }

    return {
        "seconds": timeline.seconds,
        "kind": plan.kind,
        "imbalance": plan.module.imbalance,
        "seconds_range": plan.seconds_range,
        "exposed": timeline.exposed,
        "floor": timeline.floor,
        "stragglers": timeline.stragglers,
        "waits_for_copies": timeline.waits_for_copies,
        "items_per_second": per_second,
        "items_per_second_a_device": per_second and per_second / plan.devices,
        "mfu": plan.mfu,
        "busy": {stream: timeline.busy(stream) for stream in STREAMS},
        "phases": phases.seconds(),
        "synchronous": list(timeline.synchronous),
        "unknown": timeline.unknown,
        "gaps": [
            {
                "start": gap.start,
                "seconds": gap.seconds,
                "waits_for": event(gap.waits_for),
                "before": event(gap.before),
                "after": event(gap.after),
            }
            for gap in timeline.largest_gaps()
        ],
    }


def trace(plan: Plan) -> dict[str, Any]:
    """Returns Chrome's trace events: a thread per stream, times in microseconds.

    Raises:
      ValueError: the plan has no timeline.
    """
    timeline = plan.timeline
    if timeline is None:
        raise ValueError("no timeline")
    phases = Phases(timeline)
    title = f"{plan.name} on {plan.topology}, one device"
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": title}}
    ]
    for stream in timeline.streams:
        thread = STREAMS.index(stream)
        at = {"ph": "M", "pid": 0, "tid": thread}
        order = {"sort_index": thread}
        events.append({"name": "thread_name", "args": {"name": stream}, **at})
        events.append({"name": "thread_sort_index", "args": order, **at})
    events += [
        {
            "name": x.name,
            "cat": x.kind,
            "ph": "X",
            "pid": 0,
            "tid": STREAMS.index(x.stream),
            "ts": x.start * 1e6,
            "dur": x.seconds * 1e6,
            "args": {
                "phase": phases.of(x),
                "source": x.source,
                "bytes": x.bytes,
                "flops": x.flops,
            },
        }
        for x in timeline.events
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
