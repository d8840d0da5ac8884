"""Pipelines beside other axes: whole models, with one and more stages a device."""

from typing import Any

import pytest

from split_models import trains_alike

# model, packed, optimizer, options, and parts of the batch with their own statistics
CASES: dict[str, tuple[Any, ...]] = {
    "tensor, interleaved and uneven": (
        "five layers",
        True,
        "adamw",
        {"tensor": 2, "accumulate": 4, "stages_per_device": 2},
    ),
    "tensor": ("gpt", False, "adamw", {"tensor": 2, "fsdp": 2, "accumulate": 2}),
    "context": ("llama", True, "adamw", {"context": 2, "accumulate": 2}),
    "context, kept": (
        "gpt",
        True,
        "adamw",
        {"context": 4, "accumulate": 8, "reshard_after_forward": False},
    ),
    "experts and their balance": (
        "uneven experts",
        True,
        "adamw",
        {"expert": 2, "accumulate": 2},
        2,
    ),
    "experts, context": (
        "experts",
        False,
        "muon",
        {"expert": 2, "context": 2, "accumulate": 2, "remat": "none"},
        2,
    ),
    "experts, tensor, prefetched": (
        "uneven, not balanced",
        False,
        "adamw",
        {"expert": 2, "tensor": 2, "accumulate": 4, "prefetch": True},
    ),
    "odd vocabulary": (
        "odd vocabulary",
        False,
        "adamw",
        {"tensor": 2, "accumulate": 4, "defer_scatter": True},
    ),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.slow  # test_each_axis_in_stages.py has a small model
@pytest.mark.filterwarnings("ignore:mesh. pipe=.*bubble")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_pipeline_beside_other_axes_trains_as_one_device(case):
    model, packed, optimizer, options, *parts = case
    sizes = {"pipe": 2, "fsdp": 1} | options
    number = 1
    for axis in ("pipe", "fsdp", "context", "tensor", "expert"):
        number *= sizes.get(axis, 1)
    options = {**sizes, "devices": number}
    trains_alike(model, packed, optimizer, options, *parts)
