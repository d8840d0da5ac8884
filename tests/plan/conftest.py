"""What the tests of plans share."""

import pytest

from jshard.plan import __main__ as planner


@pytest.fixture
def plan(monkeypatch, capfd):
    """Runs the command in this process: (exit code, standard output, error)."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")  # as they are already

    def run(*words):
        monkeypatch.setattr("sys.argv", ["jshard-plan", *map(str, words)])
        try:
            planner.main()
            code = 0
        except SystemExit as exit:
            code = exit.code
        return code, *capfd.readouterr()

    return run
