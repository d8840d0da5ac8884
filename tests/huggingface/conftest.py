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
