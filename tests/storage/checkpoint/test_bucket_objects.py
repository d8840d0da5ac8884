"""The objects below a URL: replaced conditionally, compared, and their errors told.

No server is needed: TensorStore's objects are files here.
"""

from typing import Any

import pytest

from jshard.storage.checkpoint.buckets import objects
from jshard.storage.checkpoint.buckets.objects import (
    MISSING,
    BucketError,
    Objects,
    Overtaken,
    explained,
    reason,
)

SPEC: Any = Objects.spec  # which `Folder` replaces


def test_an_object_is_replaced_only_instead_of_what_was_read(there):
    there.replace("x", b"1", instead_of=MISSING)
    with pytest.raises(Overtaken):
        there.replace("x", b"2", instead_of=MISSING)
    _, generation = there.read("x")
    there.replace("x", b"3", instead_of=generation)
    with pytest.raises(Overtaken):
        there.replace("x", b"4", instead_of=generation)
    assert there.read("x")[0] == b"3"
    assert there.read("y")[0] is None


def test_a_replacement_that_nothing_shows_is_written(there, monkeypatch):
    """As where the bucket is missing: the write says so."""
    written = []
    monkeypatch.setattr(Objects, "read", lambda self, path: (None, b""))
    monkeypatch.setattr(Objects, "write", lambda self, *args: written.append(args))
    there.replace("x", b"1", instead_of=b"another")
    assert written == [("x", b"1")]


def test_changed_objects_are_described(there):
    for name in ("a", "b", "c"):
        there.write(name, b"1")
    then = there.generations(["a", "b", "c"])
    assert {*then} == {"a", "b", "c"}
    assert there.changed(then, moved=False) == []
    there.delete("a")
    there.write("b", b"2")
    assert there.changed(then, moved=False) == ["a is missing", "b was replaced"]
    assert there.changed(then, moved=True) == ["a is missing"]


def test_generations_read_one_byte(there, monkeypatch):
    there.write("a", b"1234")
    asked = []
    read = there._store.read

    class Asked:
        def read(self, path, **options):
            asked.append(options["byte_range"])
            return read(path, **options)

    monkeypatch.setattr(there, "_store", Asked())
    there.changed(there.generations(["a"]), moved=False)
    assert asked == [slice(0, 1)] * 2


def test_paths_begin_with_what_is_asked_for(there):
    for name in ("a/1", "a/2", "a0", "b/1"):
        there.write(name, b"")
    assert sorted(there.paths()) == ["a/1", "a/2", "a0", "b/1"]
    assert sorted(there.paths("a/")) == ["a/1", "a/2"]
    there.delete("a/")
    assert sorted(there.paths()) == ["a0", "b/1"]
    there.delete("")
    assert there.paths() == []


def test_a_url_is_that_of_the_provider_that_the_environment_names(monkeypatch):
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_REGION",
                 "AWS_DEFAULT_REGION"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    bucket = {"bucket": "b", "path": "run/state/"}
    s3 = {"aws_credentials": {"type": "environment"}, "use_conditional_write": True}
    assert SPEC(Objects("gs://b/run"), "state/") == {"driver": "gcs"} | bucket
    assert SPEC(Objects("s3://b/run/"), "state/") == {"driver": "s3"} | bucket | s3
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio")
    place = {"endpoint": "http://minio", "aws_region": "us-east-1"}
    assert SPEC(Objects("s3://b/run"), "state/") == (
        {"driver": "s3"} | bucket | s3 | place
    )
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-2")
    assert SPEC(Objects("s3://b/run"), "")["aws_region"] == "eu-west-2"


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({"AWS_ACCESS_KEY_ID": "x"}, {"type": "environment"}),
        (
            {"AWS_CONFIG_FILE": __file__},
            {"type": "default", "profile": "default"},
        ),
        (
            {"AWS_CONFIG_FILE": __file__, "AWS_PROFILE": "me"},
            {"type": "default", "profile": "me"},
        ),
        ({"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://x"}, {"type": "ecs"}),
        ({}, {"type": "imds"}),
    ],
)
def test_credentials_are_where_the_provider_s_tools_look(env, found, monkeypatch):
    for name in ("ACCESS_KEY_ID", "SHARED_CREDENTIALS_FILE", "CONFIG_FILE", "PROFILE",
                 "WEB_IDENTITY_TOKEN_FILE", "CONTAINER_CREDENTIALS_RELATIVE_URI",
                 "CONTAINER_CREDENTIALS_FULL_URI"):  # fmt: skip
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("HOME", "/nowhere")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert objects._credentials() == found


def test_an_error_of_the_client_is_one_line_that_says_what_to_do():
    assert reason(ValueError("a\nb: NoSuchBucket [source x]")) == (
        "there is no such bucket (a b: NoSuchBucket)"
    )
    assert reason(ValueError("CURL error 7")).startswith("the server cannot be reached")
    assert reason(ValueError("http_response_code='503'")).startswith(
        "the server is busy"
    )
    assert reason(ValueError("no credentials")).startswith("no credentials were found")
    long = reason(ValueError("AccessDenied " + "x" * 900))
    assert long == f"access denied (AccessDenied {'x' * 147})"
    assert reason(ValueError("y" * 900)) == "y" * 300
    with (
        pytest.raises(BucketError, match=r"^s3://b/x: access denied"),
        explained("s3://b/x"),
    ):
        raise ValueError("AccessDenied")


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ((0, 0), "no answer from the server of s3://b for 10 s: trying again"),
        ((1, 0), ""),
        ((0, 1), "the server of s3://b is busy or cannot be reached for 10 s: trying"),
        ((1, 1), "the server of s3://b is busy or cannot be reached for 10 s: trying"),
    ],
)
def test_a_server_that_is_late_is_told(now, said, monkeypatch, caplog):
    monkeypatch.setattr(objects, "_counts", lambda: now)
    objects._say_late("s3://b", 0, 0)
    assert bool(said) == bool(caplog.text)
    assert said in caplog.text


def test_tensorstore_has_the_metrics_by_which_requests_are_counted():
    """An unknown name raises; the counts are those of earlier tests' servers."""
    assert min(objects._counts()) >= 0
