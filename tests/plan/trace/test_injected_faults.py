"""Traces of real steps on CPU devices, in each of which one fault is injected."""

import pytest

from traced_faults import Program, misses

pytestmark = pytest.mark.slow
# Twice what steps deviate where 20 programs share two cores (docs/figures/cpu.md).
SIZES = {"host": 1.0, "device": 1.0, "padded": 1 << 24, "flag": 1}


@pytest.mark.parametrize("fault", SIZES)
def test_the_injected_fault_is_the_first_that_is_named(tmp_path, fault):
    program = Program(heavy=fault == "flag")
    assert list(misses(tmp_path, program, fault, SIZES[fault])) == []
