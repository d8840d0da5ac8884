"""The constants that published steps fit: kit/calibration.py, on steps made up here."""

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from jshard.plan import hlo
from jshard.plan.cost.timeline import replay
from jshard.plan.fit.hardware import GPUS, STATED
from kit import fitting  # pyright: ignore[reportMissingImports]
from kit.calibration import (  # pyright: ignore[reportMissingImports]
    LEAST,
    Step,
    fit,
    fit_variants,
    left_out,
    standard_errors,
    step_of,
)
from kit.published_kernels import kernels  # pyright: ignore[reportMissingImports]

PRODUCTS = (("matmul", "attention"),)
BOTH = (*PRODUCTS, ("memory",))
TRUTH = dataclasses.replace(STATED, matmul=0.6, attention=0.5, memory=0.7)
# Products, float8, attention, memory, kernels, exposed, doublings of hosts: no two
# alike in their shares.
HELD = [
    (0.33, 0.00, 0.03, 0.05, 1500, 0.01, 0.0),
    (4.00, 0.00, 0.20, 0.31, 7000, 0.00, 900.0),
    (8.40, 0.00, 0.80, 0.53, 7500, 0.90, 2000.0),
    (0.66, 0.00, 0.06, 0.30, 1500, 0.20, 0.0),
]
FLOAT8 = [(0.02, 2.0, 0.20, 0.46, 7000, 0.01, 400.0 * n) for n in (3, 5)]


def steps(constants=TRUTH, *, noise=(1.0, 1.0, 1.0, 1.0), held=HELD):
    made = [Step(f"run {n}", f"source {n}", 0.0, *held) for n, held in enumerate(held)]
    return [
        dataclasses.replace(step, measured=step.seconds(constants) * factor)
        for step, factor in zip(made, noise, strict=True)
    ]


def test_known_constants_are_recovered():
    start = dataclasses.replace(STATED, attention=0.6)  # the ratio of TRUTH
    found = fit(steps(), start, BOTH)
    assert found.matmul == pytest.approx(TRUTH.matmul)
    assert found.attention == pytest.approx(TRUTH.attention)
    assert found.memory == pytest.approx(TRUTH.memory)
    assert found.launch == STATED.launch


def test_float8_and_stragglers_are_told_apart():
    truth = dataclasses.replace(TRUTH, float8=0.66, straggle=2e-4)
    start = dataclasses.replace(
        STATED, attention=0.6, memory=0.7, float8=0.8, straggle=1e-4
    )
    held = [*HELD, *FLOAT8]
    made = steps(truth, noise=(1.0,) * len(held), held=held)
    found = fit(made, start, (*PRODUCTS, ("float8",), ("straggle",)))
    assert found.float8 == pytest.approx(0.66)
    assert found.straggle == pytest.approx(2e-4)
    assert found.matmul == pytest.approx(TRUTH.matmul)


def test_a_fit_is_the_same_every_time():
    noisy = steps(noise=(1.05, 0.97, 1.01, 1.02))
    assert fit(noisy, STATED, BOTH) == fit(noisy, STATED, BOTH)


def test_a_share_stays_within_its_bounds():
    slow = steps(noise=(9.0, 9.0, 9.0, 9.0))
    assert fit(slow, STATED, PRODUCTS).matmul == LEAST


def test_a_step_left_out_shows_its_own_error():
    start = dataclasses.replace(STATED, attention=0.5, memory=0.7)
    noisy = steps(noise=(1.2, 1.0, 1.0, 1.0))
    ratios = left_out([noisy], start, PRODUCTS, lambda x, y: x.name == y.name)
    assert ratios[0] == pytest.approx(1.2, abs=0.02)
    assert all(ratio < 1.0 for ratio in ratios[1:])


def test_steps_of_one_source_weigh_as_much_as_one():
    start = dataclasses.replace(STATED, attention=0.5, memory=0.7)
    noisy = steps(noise=(1.1, 1.0, 1.0, 1.0))
    again = [dataclasses.replace(noisy[0], name=f"again {n}") for n in range(5)]
    once, often = fit(noisy, start, PRODUCTS), fit([*noisy, *again], start, PRODUCTS)
    assert often.matmul == pytest.approx(once.matmul)


def test_the_variant_that_fits_best_is_taken():
    start = dataclasses.replace(STATED, attention=0.6, memory=0.7)
    right = steps()
    wrong = [dataclasses.replace(step, exposed=2 * step.exposed) for step in right]
    best, constants = fit_variants([wrong, right, wrong], start, PRODUCTS)
    assert best == 1
    assert constants.matmul == pytest.approx(TRUTH.matmul)


def test_what_the_steps_do_not_tell_apart_has_a_large_standard_error():
    noise = (1.02, 0.99, 1.01, 0.98)
    told, _ = standard_errors(steps(noise=noise), TRUTH, BOTH)
    alike = [
        dataclasses.replace(step, memory=0.1 * step.products)
        for step in steps(noise=noise)
    ]
    untold, _ = standard_errors(alike, TRUTH, BOTH)
    assert told < 0.1 < untold


def test_a_step_is_its_schedule_whatever_the_constants():
    text = """HloModule m, is_scheduled=true

ENTRY %main (a: bf16[4096,4096], b: bf16[4096,4096]) -> bf16[4096,4096] {
  %a = bf16[4096,4096] parameter(0)
  %b = bf16[4096,4096] parameter(1)
  %dot = bf16[4096,4096] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %copy = bf16[4096,4096] copy(%dot)
}
"""
    module = hlo.parse(text)
    found = []
    for constants in (STATED, TRUTH):
        gpu = dataclasses.replace(GPUS["h100"], constants=constants)
        timeline = replay(module, gpu, 1)
        found.append(step_of("run", "source", 1.0, timeline, gpu))
        assert found[-1].seconds(constants) == pytest.approx(timeline.seconds)
    assert found[0].products == pytest.approx(2 * 4096**3 / GPUS["h100"].flops)
    assert found[0].products == pytest.approx(found[1].products)
    assert found[0].memory == pytest.approx(found[1].memory)
    assert found[0].kernels == 2


def test_published_kernels_reach_physical_shares_of_their_peaks():
    shares = fitting.fit(kernels(), "h100")
    assert 0.7 < shares["matmul"] < 0.85
    assert shares["float8"] == pytest.approx(shares["matmul"], rel=0.05)
    assert 0.4 < shares["attention"] < shares["matmul"]
    assert shares["memory"] == pytest.approx(STATED.memory, rel=0.05)
