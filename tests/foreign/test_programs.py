"""Every program trains as with plain Flax, on any number of devices."""

import dataclasses
from collections.abc import Iterator

import jax
import pytest
from flax import nnx

import jshard
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


DEVICES = (1, 2, 3, 4, 6, 8)


def case(name: str, devices: int, units: bool) -> str:
    return f"{name}-{devices}-{'units' if units else 'root'}"


def cases() -> Iterator[tuple[str, int, bool]]:
    """Each program in the default suite's way, and on another number of devices.

    The numbers take turns. There every other program is without units.
    """
    for i, (name, program) in enumerate(PROGRAMS.items()):
        chosen = {program.default, (DEVICES[i % 6], bool(program.units) and i % 4 < 2)}
        yield from ((name, devices, units) for devices, units in sorted(chosen))


pytestmark = [
    pytest.mark.usefixtures("x64_of_all_threads"),
    pytest.mark.filterwarnings("ignore:.*of the parameters are in no Stack or Unit"),
    pytest.mark.filterwarnings("ignore:loss_fn changes parameter"),
    pytest.mark.filterwarnings("ignore:Using 'Module.sow.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:parameter .* is read outside of its unit"),
]


@pytest.fixture
def x64_of_all_threads():
    """64-bit precision where callbacks run, too, which is in threads of XLA."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


# What computes on the host, and a kernel, on 3 and 2 devices. Arrays in no Variable are
# below. Branches, loops and the exact GELU are in
# test_foreign_layers.py of units, too, units in branches in its test_equal.py, effects
# in its test_effects.py, convolutions in tests/recipes.
DEFAULT = [
    case(name, *PROGRAMS[name].default) for name in ("pure-callback", "pallas-rule")
]


@pytest.mark.quick(*DEFAULT)
@pytest.mark.parametrize(
    ("program", "devices", "units"),
    [
        pytest.param(PROGRAMS[name], devices, units, id=case(name, devices, units))
        for name, devices, units in cases()
    ],
)
def test_it_trains_as_with_plain_flax(program: Program, devices: int, units: bool):
    check(program, devices, units=units)


# Arrays in no Variable, and what one step leaves to the next.
HELD = ("numpy-table", "data-table", "jax-table", "weight-norm", "vq", "branch")


@pytest.mark.quick("data-table-2-units")
@pytest.mark.parametrize(
    ("name", "devices", "units"),
    [
        pytest.param(name, devices, units, id=case(name, devices, units))
        for name in HELD
        for devices, units in ((2, True), (8, False))
    ],
)
def test_a_model_that_exists_trains_as_one_that_is_made(name, devices, units):
    check(PROGRAMS[name], devices, units=units, exists=True)


# What is no sum over examples alone has other values on a part of them.
WHOLE = ("clip", "clip-whole", "barlow", "vq", "branch", "spectral-norm", "jit")


@pytest.mark.slow  # by default other models, in tests/test_parity.py
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in WHOLE])
def test_it_trains_alike_on_a_few_examples_at_a_time(name):
    check(PROGRAMS[name], 4, units=bool(PROGRAMS[name].units), accumulate=3)


def test_an_io_callback_in_a_layer_that_is_recomputed_is_refused_in_words():
    again = dataclasses.replace(PROGRAMS["io-callback"], remat="full")
    with pytest.raises(jshard.UserError, match=r"io_callback .* remat='none'"):
        check(again, 2, units=True)


def test_a_forward_derivative_through_a_unit_is_refused_in_words():
    tangent = dataclasses.replace(PROGRAMS["tangent"], units=(nnx.Linear,))
    with pytest.raises(jshard.UserError, match="forward-mode differentiation"):
        check(tangent, 2, units=True)
