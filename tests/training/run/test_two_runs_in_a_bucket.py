"""Two runs at one URL: the later start has it, whenever the earlier one saves."""

from typing import Any

import pytest

from bucket_servers import Folder, running
from jshard.storage.checkpoint.buckets import step_list
from jshard.storage.checkpoint.buckets.objects import Objects
from jshard.system.errors import RunFailed, UserError
from jshard.training.run.bucket import RunInBucket
from jshard.training.trainer import Trainer
from stopped_runs import RECIPE

GIVEN: dict[str, Any] = {
    "eval_every": 0, "checkpoint.every": 2, "checkpoint.keep": 1, "model.noise": 0.0,
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with running(Folder, tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture
def url(store, tmp_path):
    return f"{store.url}/{tmp_path.name}"


@pytest.fixture
def trainer(url, tmp_path):
    (tmp_path / "tiny.py").write_text(RECIPE)

    def make(steps: int, **given: Any) -> Trainer:
        config = GIVEN | {"steps": steps}
        return Trainer(tmp_path / "tiny.py", config=config, workdir=url, **given)

    return make


def test_a_start_goes_on_from_what_an_earlier_run_saves_meanwhile(
    trainer, url, monkeypatch, capsys
):
    trainer(2).fit()
    claim, others = RunInBucket.claim, [trainer(4)]

    def claim_late(self):
        if others:  # the first claim is that of the later run
            others.pop().fit()  # which deletes what the later one has found
        return claim(self)

    monkeypatch.setattr(RunInBucket, "claim", claim_late)
    later = trainer(6)
    later.fit()
    assert int(later.state.step) == 6
    assert "after step 4" in capsys.readouterr().out
    assert [*step_list.read(Objects(f"{url}/checkpoints"))] == [6]


def test_a_start_that_fails_leaves_the_run_that_saves_there_alone(trainer, url):
    def start_another(trainer_, step, metrics):
        if step == 3:
            with pytest.raises(UserError, match="sample"):
                trainer(6, sample=lambda config: 3).fit()

    trainer(4, on_step=start_another).fit()  # and saves after step 4
    assert [*step_list.read(Objects(f"{url}/checkpoints"))] == [4]


@pytest.mark.slow  # test_buckets.py has the refusal
def test_the_earlier_run_ends_at_its_next_save_and_a_reader_with_a_line(trainer, url):
    def overtake(trainer_, step, metrics):
        if step == 3:
            assert not RunInBucket(url).claim()

    trainer(2).fit()
    with pytest.raises(RunFailed, match="another run, which was started later"):
        trainer(4, on_step=overtake).fit()
    reader = trainer(4)
    (name,) = step_list.read(Objects(f"{url}/checkpoints")).values()
    start = reader._ready().find_start()
    Objects(f"{url}/checkpoints/{name}").delete("")
    with pytest.raises(UserError, match="objects of it are gone; if a run saves there"):
        reader._ready().restore(start)
