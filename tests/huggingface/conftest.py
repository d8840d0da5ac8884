"""What tests against transformers share."""

import warnings

import pytest


@pytest.fixture(scope="session")
def transformers():
    """The library, imported without its warnings, if it is there with torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torch")
        yield pytest.importorskip("transformers", reason="needs transformers")


@pytest.fixture(scope="session")
def transformers5(transformers):
    """The library from its fifth release on, which jshard follows where they differ.

    4.57 does not read `rope_parameters`, fails on nulls that 5 reads, decodes FP8 on
    GPUs alone, and rounds the losses that its Trainer logs.
    """
    if int(transformers.__version__.partition(".")[0]) < 5:
        pytest.skip("needs transformers 5")
    return transformers
