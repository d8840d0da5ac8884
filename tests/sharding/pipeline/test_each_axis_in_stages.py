"""A small model in stages, alone and beside other axes, follows one device."""

import pytest

from tiny_axes import follows_one_device

pytestmark = [
    pytest.mark.usefixtures("x64"),
    pytest.mark.filterwarnings("ignore:mesh. pipe=.*bubble"),
]


@pytest.mark.slow  # by default five layers in test_pipeline.py
def test_a_step_in_uneven_stages_is_that_of_one_device():
    follows_one_device({"pipe": 2, "fsdp": 1}, accumulate=2)


@pytest.mark.slow  # by default test_each_axis.py, and interleaved in test_pipeline.py
def test_interleaved_stages_beside_split_sequences_and_features_follow_one_device():
    sizes = {"pipe": 2, "fsdp": 1, "context": 2, "tensor": 2}
    follows_one_device(sizes, accumulate=2, prefetch=True, stages_per_device=2)
