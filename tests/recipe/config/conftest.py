"""A config with keys of all kinds, and commands that must refuse their words."""

import sys

import pytest
from ml_collections import ConfigDict, config_dict

import jshard.export
import jshard.inspect
import jshard.launch
import jshard.plan.__main__
import jshard.plan.topology
import jshard.tokenize
import jshard.train
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


@pytest.fixture
def refused(monkeypatch, capsys):
    """Runs a command in this process: exit 2, and one line that says what is named."""

    def accepted(*args, **kwargs):
        raise AssertionError("accepted")

    # Where everything is found good.
    monkeypatch.setattr(jshard.Trainer, "fit", accepted)
    monkeypatch.setattr("jshard.training.train_command.make_cpu_devices", accepted)
    monkeypatch.setattr(jshard.plan.__main__, "make_cpu_devices", accepted)
    monkeypatch.setattr("jshard.plan.search_command.search", accepted)
    monkeypatch.setattr(jshard.plan.topology, "has_plugin", lambda: True)
    monkeypatch.setattr(jshard.launch.Launcher, "run", accepted)

    def run(command, words, *named):
        monkeypatch.setattr(sys, "argv", [command.__name__, *words])
        with pytest.raises(SystemExit) as end:
            command.main()
        out, err = capsys.readouterr()
        assert (end.value.code, out) == (2, ""), words
        assert err.startswith("jshard: error: "), err[:500]
        assert err.count("\n") == 1, err
        assert len(err) < 1500, err
        assert any(name in err for name in named), (words, err)

    return run
