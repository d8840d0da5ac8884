"""Checkpoints in buckets, on the servers of two protocols."""

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from urllib.parse import parse_qs, quote, urlsplit

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucket_servers import BUCKET, GCS, S3, Folder, Proxy, Server, free_port, running
from jshard.storage.checkpoint.buckets.arrays import on_host
from jshard.storage.checkpoint.buckets.mirror import on_disk
from jshard.storage.checkpoint.buckets.objects import Objects
from jshard.storage.checkpoint.buckets.step_list import StepList
from jshard.storage.checkpoint.checkpointer import Checkpointer, Save
from jshard.storage.checkpoint.metadata import arrays_by_name
from jshard.storage.checkpoint.restore import find_damage, restore_state
from jshard.system.errors import UserError
from known_states import abstract, check_state, make_state


@pytest.fixture(scope="module", params=[S3, GCS])
def server(request, tmp_path_factory):
    with running(request.param, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module", params=[Folder, S3, GCS])
def store(request, tmp_path_factory):
    with running(request.param, tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture
def url(store, request) -> str:
    """The URL of a run that does not exist yet."""
    name = re.sub(r"\W+", "-", request.node.name)
    return f"{store.url}/{name}"


def save(url: str, *steps: int, **options) -> list[Save]:
    """Saves known states of these steps; returns the outcomes."""
    saves: list[Save] = []
    with Checkpointer(url, report=saves.append, **options) as checkpointer:
        for step in steps:
            checkpointer.save(make_state(abstract(), step))
    return saves


def steps_in(url: str) -> set[str]:
    """The steps of which there are objects in the bucket."""
    return {x.partition("-")[0] for x in Objects(url).paths() if x != "steps.json"}


def newest(url: str) -> Objects:
    """The objects of the newest step."""
    steps = json.loads(Objects(url).read("steps.json")[0] or b"")["steps"]
    return Objects(url).below(steps[max(steps, key=int)])


def test_a_state_comes_back_on_any_mesh_and_the_best_and_newest_stay(url):
    saves: list[Save] = []
    options = {"keep": 2, "best": "loss", "report": saves.append}
    with Checkpointer(url, **options) as checkpointer:
        for step, loss in [(1, 3.0), (2, 1.0), (3, 2.0), (4, 2.5)]:
            state = make_state(abstract(), step)
            checkpointer.save(state, metrics={"loss": loss})
    assert [save.error for save in saves] == [""] * 4
    assert steps_in(url) == {"2", "3", "4"}
    other = Checkpointer(url)
    assert other.steps() == [2, 3, 4]
    check_state(other.restore(abstract(2, 2)), 4)
    check_state(other.restore(abstract(2, 4), 2), 2)


def test_a_save_copies_no_shard_of_a_cpu_and_has_its_values_when_it_is_donated():
    state = make_state(abstract(), 1)
    found = arrays_by_name(state).items()
    arrays = {name: x for name, x in found if jnp.issubdtype(x.dtype, jnp.floating)}
    before = {name: x.addressable_shards for name, x in arrays.items()}
    shards = on_host(arrays)
    for name, (_, own) in shards.items():
        there = {x.data.unsafe_buffer_pointer() for x in before[name]}
        assert {values.ctypes.data for _, values in own} <= there
    expected = [x.copy() for _, own in shards.values() for _, x in own]
    del before, state
    add = jax.jit(
        lambda arrays: jax.tree.map(lambda x: x + x, arrays), donate_argnums=0
    )
    for _ in range(3):
        arrays = add(arrays)
    jax.block_until_ready(arrays)
    seen = [x for _, own in shards.values() for _, x in own]
    assert all(map(np.array_equal, seen, expected))


def test_a_step_that_is_saved_again_is_replaced(url):
    save(url, 5)
    before = newest(url).url
    save(url, 5)
    assert newest(url).url != before
    assert len({path.partition("/")[0] for path in Objects(url).paths()}) == 2
    check_state(Checkpointer(url).restore(abstract()), 5)


@pytest.mark.parametrize("harm", ["missing", "replaced"])
def test_the_step_before_is_used_if_an_object_is(harm, url):
    save(url, 1, 2)
    path = max(newest(url).paths("state/d/"))
    content = newest(url).read(path)[0] or b""
    newest(url).delete(path)
    if harm == "replaced":
        newest(url).write(path, content[:-1] + b"x")
    with pytest.warns(UserWarning, match=f"step 2 is damaged: {path} (is|was) {harm}"):
        check_state(Checkpointer(url).restore(abstract()), 1)


def test_a_copy_elsewhere_is_verified_while_it_is_read(url):
    save(url, 1)
    copy = Objects(f"{url}-copy/1-abc")
    for path in newest(url).paths():
        copy.write(path, newest(url).read(path)[0] or b"")
    step = on_disk(copy.url)
    assert not find_damage(step)
    check_state(restore_state(step, abstract()), 1)
    for path in newest(url).paths("state/d/"):
        content = bytearray(newest(url).read(path)[0] or b"")
        content[len(content) // 2] ^= 1
        copy.write(path, bytes(content))
    assert not find_damage(step)
    with pytest.raises(UserError, match=f"{copy.url} is damaged: .* another checksum"):
        restore_state(step, abstract())


def test_only_the_run_that_started_last_saves(url):
    saves: list[Save] = []
    first = Checkpointer(url, report=saves.append)
    first.save(make_state(abstract(), 1))
    first.wait()
    second = Checkpointer(url, report=saves.append)
    for step, checkpointer in [(2, first), (3, second)]:
        checkpointer.save(make_state(abstract(), step))
        checkpointer.wait()
    assert [save.overtaken for save in saves] == [False, True, False]
    assert saves[1].error == f"{url}: another run, which was started later, saves there"
    assert steps_in(url) == {"1", "3"}


def test_what_a_killed_save_left_is_deleted(url):
    StepList(Objects(url))
    Objects(url).write("7-0123abcd/state/d/xyz", b"part")
    save(url, 8)
    assert steps_in(url) == {"8"}


CONDITIONS = """
import sys
from jshard.storage.checkpoint.buckets.objects import MISSING, Objects, Overtaken

def is_refused(content, generation):
    try:
        there.replace("x", content, instead_of=generation)
    except Overtaken:
        return True

there = Objects(sys.argv[1])
assert not is_refused(b"1", MISSING)
assert is_refused(b"2", MISSING)
_, generation = there.read("x")
assert not is_refused(b"3", generation)
assert is_refused(b"4", generation)
assert there.read("x")[0] == b"3"
"""


def test_a_conditional_write_notices_another(server):
    with Proxy(server) as proxy:
        refused = []
        if isinstance(server, GCS):  # fake-gcs-server ignores conditions

            def status(method: str, path: str) -> int:
                query = parse_qs(urlsplit(path).query)
                (expected,) = query.get("ifGenerationMatch", [""])
                if method != "POST" or not expected:
                    return 0
                met = expected == generation(server, query["name"][0])
                refused.append(not met)
                return 0 if met else 412

            proxy.status = status
        subprocess.run(
            [sys.executable, "-c", CONDITIONS, f"{server.url}/conditions"],
            env=os.environ | proxy.env,
            check=True,
        )
    if isinstance(server, GCS):
        assert refused == [False, True, False, True]


def generation(server: Server, name: str) -> str:
    """An object's generation in Google's store; "0" if there is none."""
    quoted = quote(name, safe="")
    url = f"{server.endpoint}/storage/v1/b/{BUCKET}/o/{quoted}"
    try:
        with urllib.request.urlopen(url) as answer:
            return json.load(answer)["generation"]
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return "0"
        raise


def test_what_is_wrong_with_a_bucket_is_one_line(server):
    scheme = server.url.partition(":")[0]
    with pytest.raises(UserError, match=r"cannot write checkpoints to .*: there is no"):
        Checkpointer(f"{scheme}://nobody-has-this/run")
    with pytest.raises(UserError, match=r"must be like s3://BUCKET/PATH"):
        Checkpointer(f"{scheme}://bucket-alone")
    with pytest.raises(UserError, match="holds no checkpoint"):
        on_disk(f"{server.url}/nothing")


def test_a_server_that_does_not_answer_is_one_line(server, monkeypatch):
    name = "AWS_ENDPOINT_URL" if isinstance(server, S3) else "TENSORSTORE_GCS_HTTP_URL"
    if isinstance(server, GCS):
        pytest.skip("TensorStore reads its variable once")
    monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    with pytest.raises(
        UserError, match=r"cannot read .*: the server cannot be reached"
    ):
        on_disk(f"{server.url}/run")


def test_credentials_that_are_wrong_or_may_not_write_are_one_line(
    tmp_path, monkeypatch
):
    boto3 = pytest.importorskip("boto3", reason="it comes with moto")
    pytest.importorskip(S3.package)
    may_read = {"Effect": "Allow", "Action": ["s3:Get*", "s3:List*"], "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [may_read]})
    # Only the bucket and the user that reads are made without a key that it knows.
    with S3(tmp_path / "server", INITIAL_NO_AUTH_ACTION_COUNT="4") as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        iam = boto3.client("iam", "us-east-1", endpoint_url=server.endpoint)
        iam.create_user(UserName="reader")
        iam.put_user_policy(UserName="reader", PolicyName="p", PolicyDocument=policy)
        key = iam.create_access_key(UserName="reader")["AccessKey"]
        url = f"{server.url}/run"
        with pytest.raises(UserError, match=f"{url}: the credentials are not valid"):
            Checkpointer(url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
        with pytest.raises(UserError, match=f"cannot write .* {url}: access denied"):
            Checkpointer(url)
        # The same, in a file.
        (tmp_path / ".aws").mkdir()
        (tmp_path / ".aws/credentials").write_text(
            "[default]\naws_access_key_id=other\naws_secret_access_key=other\n"
            f"[reader]\naws_access_key_id={key['AccessKeyId']}\n"
            f"aws_secret_access_key={key['SecretAccessKey']}\n"
        )
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        with pytest.raises(UserError, match=f"{url}: the credentials are not valid"):
            Checkpointer(url)
        monkeypatch.setenv("AWS_PROFILE", "reader")
        with pytest.raises(UserError, match=f"cannot write .* {url}: access denied"):
            Checkpointer(url)
        monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with pytest.raises(UserError, match=f"{url}: no credentials were found"):
            Checkpointer(url)
