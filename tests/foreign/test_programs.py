"""Every program trains as with plain Flax, on any number of devices."""

import jax
import pytest

import programs_attributes
import programs_calls
import programs_losses
import programs_models
from compare import Program, check

PROGRAMS = {
    **programs_models.PROGRAMS,
    **programs_losses.PROGRAMS,
    **programs_calls.PROGRAMS,
    **programs_attributes.PROGRAMS,
}


def case(name: str, devices: int, units: bool) -> str:
    return f"{name}-{devices}-{'units' if units else 'root'}"


CASES = [
    pytest.param(program, devices, units, id=case(name, devices, units))
    for name, program in PROGRAMS.items()
    for devices in (1, 2, 3, 4, 8)
    for units in (False, True)
]


@pytest.fixture
def x64_of_all_threads():
    """64-bit precision where callbacks run, too, which is in threads of XLA."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.quick(*(case(name, *p.default) for name, p in PROGRAMS.items()))
@pytest.mark.usefixtures("x64_of_all_threads")
@pytest.mark.filterwarnings("ignore:.*of the parameters are in no Stack or Unit")
@pytest.mark.filterwarnings("ignore:Using 'Module.sow.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:parameter .* is read outside of its unit")
@pytest.mark.parametrize(("program", "devices", "units"), CASES)
def test_it_trains_as_with_plain_flax(program: Program, devices: int, units: bool):
    check(program, devices, units=units)
