"""A small model on a mesh with one more axis, and with all, follows one device."""

import pytest

from tiny_axes import follows_one_device


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "axis",
    [
        # The case below splits sequences by default, too.
        pytest.param("context", marks=pytest.mark.slow),
        pytest.param("tensor", marks=pytest.mark.core),
    ],
)
def test_a_step_of_split_sequences_and_features_is_that_of_one_device(axis):
    follows_one_device({"replica": 2, "fsdp": 2, axis: 2})


@pytest.mark.slow  # core has a step of both axes
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("sizes", "remat"),
    [
        ({"fsdp": 2, "context": 2, "tensor": 2}, "full"),
        pytest.param(
            {"replica": 2, "fsdp": 1, "context": 2, "tensor": 2},
            "none",
            marks=pytest.mark.slow,  # "all at once" of test_expert_models.py
        ),
    ],
    ids=["shards", "replicas"],
)
def test_a_step_in_micro_batches_on_all_axes_is_that_of_one_device(sizes, remat):
    follows_one_device(sizes, accumulate=2, remat=remat)
