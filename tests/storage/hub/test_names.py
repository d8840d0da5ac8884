"""What is a name on the Hugging Face Hub, and what a path."""

from pathlib import Path

import pytest

from jshard.storage.hub.online.names import Name, parse
from jshard.system.errors import UserError

COMMIT = "0123456789" * 4


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", Name("Qwen/Qwen3-0.6B")),
        ("hf://org/a.b_c", Name("org/a.b_c")),
        (Path("hf://org/a"), Name("org/a")),  # which drops a slash
        ("org/a@v1.0", Name("org/a", "v1.0")),
        ("org/a@refs/pr/4", Name("org/a", "refs/pr/4")),
        ("org/a@feature%2Fx", Name("org/a", "feature/x")),
        (f"org/a@{COMMIT}", Name("org/a", "", COMMIT)),
        (f"hf://org/a@v1@{COMMIT}", Name("org/a", "v1", COMMIT)),
        (f"org/a@{COMMIT[:8]}", Name("org/a", COMMIT[:8])),
    ],
)
def test_names_of_models(text, name):
    assert parse(text) == name
    assert parse(str(name)) == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hf://datasets/org/a", Name("org/a", kind="dataset")),
        (
            "hf://datasets/org/a/b--c",
            Name("org/a", kind="dataset", path="b--c"),
        ),
        ("hf://datasets/org/a@v1/b/c", Name("org/a", "v1", "", "dataset", "b/c")),
        (
            f"hf://datasets/org/a@v1@{COMMIT}/b",
            Name("org/a", "v1", COMMIT, "dataset", "b"),
        ),
        (
            "hf://datasets/org/a@refs/convert/parquet/b",
            Name("org/a", "refs/convert/parquet", "", "dataset", "b"),
        ),
    ],
)
def test_names_of_datasets(text, name):
    assert parse(text, "dataset") == name
    assert parse(str(name), "dataset") == name


@pytest.mark.parametrize(
    "text",
    [
        "",
        "model",
        "/runs/a",
        "./runs/a",
        "../runs",
        "~/runs",
        "runs/a/b",
        "runs/a/",
        "org/a..b",
        "org/a--b",
        "org/é",
        "s3://org/a",
        "gs:/org/a",
        "a\0/b",
    ],
)
def test_paths_are_no_names(text):
    assert parse(text) is None


def test_a_folder_comes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse("runs/a") == Name("runs/a")
    (tmp_path / "runs/a").mkdir(parents=True)
    assert parse("runs/a") is None
    assert parse("hf://runs/a") == Name("runs/a")
    assert parse("runs/b", "dataset") is None  # a dataset's begins with hf://
    assert parse("runs/a", "stream") is None
    streamed = Name("runs/b", "v1", kind="dataset")
    assert parse("runs/b@v1", "stream") == streamed
    assert parse(str(streamed), "stream") == streamed
    assert parse("runs/b@v1:0.3", "stream") is None


@pytest.mark.parametrize(
    "text", ["hf://", "hf://gpt2", "hf://org/a/b", "hf://org/a--b"]
)
def test_what_begins_like_a_name_must_be_one(text):
    with pytest.raises(UserError, match="no name on the Hugging Face Hub, such"):
        parse(text)


def test_models_and_datasets_are_told_apart():
    with pytest.raises(UserError, match="names a dataset: give a model here, like"):
        parse("hf://datasets/org/a")
    with pytest.raises(UserError, match="names a model: give a dataset here, like"):
        parse("hf://org/a", "dataset")
