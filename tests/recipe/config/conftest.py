"""A config with keys of all kinds."""

import pytest
from ml_collections import ConfigDict, config_dict

from jshard.recipe.config.run_config import complete


@pytest.fixture
def config():
    return complete(
        ConfigDict(
            {
                "steps": 10,
                "batch_size": 8,
                "optimizer": {"learning_rate": 1e-3, "betas": (0.9, 0.95)},
                "model": {"dropout": False, "widths": (8, 8), "name": "mlp"},
                "limit": config_dict.placeholder(int),
                "files": ("a.txt",),
            }
        ),
        "mlp.py",
    )
