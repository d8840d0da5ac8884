"""Data, token files, exports and plans in buckets, on the servers of two protocols."""

import re
import shutil
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from bucket_servers import GCS, S3, running
from exports import init, save
from jshard.data.text.text_data import text_data
from jshard.data.text.token_writer import write_token_files
from jshard.export import export
from jshard.plan.__main__ import main as plan
from jshard.storage.checkpoint.buckets import files
from jshard.system.errors import RunFailed, UserError
from small_tokenizer import TEXT, make_tokenizer

PACKAGES = {S3: "s3fs", GCS: "gcsfs"}


@pytest.fixture(scope="module", params=[S3, GCS])
def server(request, tmp_path_factory):
    pytest.importorskip(PACKAGES[request.param])
    with running(request.param, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("JSHARD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def url(server, request) -> str:
    """The URL of a folder that does not exist yet."""
    name = re.sub(r"\W+", "-", request.node.name)
    return f"{server.url}/{name}"


def put(url: str, **contents: str) -> None:
    for name, text in contents.items():
        files.write_text(f"{url}/{name}.txt", text)


def read(folder: Path) -> dict[str, str]:
    """The texts of the files of a folder that are not hidden."""
    return {
        file.relative_to(folder).as_posix(): file.read_text()
        for file in folder.rglob("*")
        if file.is_file() and not file.name.startswith(".")
    }


def test_a_copy_follows_the_bucket_and_is_downloaded_once(url, cache, capsys):
    put(url, a="one", b="two")
    folder = files.downloaded(url)
    assert folder == cache / "buckets" / url.replace("://", "/")
    assert capsys.readouterr().err == f"jshard: downloading 6 B of {url} to {folder}\n"
    assert files.downloaded(url) == folder
    assert capsys.readouterr().err == ""
    put(url, b="three", c="four")
    files._store(url).rm_file(f"{url}/a.txt")
    assert read(files.downloaded(url)) == {"b.txt": "three", "c.txt": "four"}
    assert "downloading 9 B of" in capsys.readouterr().err
    assert files.downloaded(f"{url}/c.txt").read_text() == "four"


def test_a_download_that_was_killed_is_made_again(url):
    put(url, a="one", b="two")
    folder = files.downloaded(url)
    (folder / ".a.txt.version").unlink()
    (folder / "a.txt").write_text("on")
    (folder / ".c.txt.part").write_text("th")
    assert read(files.downloaded(url)) == {"a.txt": "one", "b.txt": "two"}


def test_what_is_wrong_is_one_line(url, server, monkeypatch):
    scheme = url.partition(":")[0]
    with pytest.raises(UserError, match=f"{url}: there is no such file or folder"):
        files.downloaded(url)
    nobody = f"{scheme}://nobody-has-this/x"
    with pytest.raises(UserError, match=f"cannot read {nobody}: there is no such buc"):
        files.downloaded(nobody)
    with pytest.raises(UserError, match=f"cannot write {nobody}: there is no such buc"):
        files.write_text(nobody, "")
    if isinstance(server, S3):  # fake-gcs-server stores no such name
        files.write_text(f"{url}-up/../x", "")
        with pytest.raises(
            UserError, match=r"up/../x is not a valid path on a disk; rename"
        ):
            files.downloaded(f"{url}-up")
    put(url, a="one")
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2))
    with pytest.raises(RunFailed, match=f"{url} takes 3 B, and .* has 2 B free: make"):
        files.downloaded(url)
    monkeypatch.setitem(sys.modules, PACKAGES[type(server)], None)
    with pytest.raises(UserError, match=r"need \w+: pip install 'jshard\[buckets\]'"):
        files.downloaded(url)


def test_token_files_are_those_of_a_disk(url, tmp_path, capsys):
    pytest.importorskip("tokenizers")
    tokenizer = make_tokenizer(tmp_path)
    put(f"{url}/text", a=TEXT, val=TEXT[:90], z=TEXT[9:])
    texts = tmp_path / "text"
    shutil.copytree(files.downloaded(f"{url}/text"), texts)
    for source, output in [(texts, tmp_path / "tokens"), (f"{url}/text", f"{url}/out")]:
        write_token_files([source], tokenizer, output)
    assert f"--config.data.path={url}/out" in capsys.readouterr().out
    with pytest.raises(UserError, match=f"--output={url}/out holds tokens.json; give"):
        write_token_files([texts], tokenizer, f"{url}/out")
    for split in ("train", "validation"):
        here, there = (
            text_data(path, split, sequence_length=8, seed=1)
            for path in (str(tmp_path / "tokens"), f"{url}/out")
        )
        for i in range(9):
            np.testing.assert_array_equal(here[i]["inputs"], there[i]["inputs"])


def test_an_export_is_that_of_a_disk(url, tmp_path, capsys):
    run = save(tmp_path / "run", init())
    for output in (tmp_path / "out", f"{url}/out"):
        export(run, output, shard_bytes=5000)
    assert f"tensors in {url}/out" in capsys.readouterr().out
    here, there = tmp_path / "out", files.downloaded(f"{url}/out")
    names = {file.name for file in here.iterdir()}
    assert len(names) > 3
    assert names == {file.name for file in there.iterdir() if file.name[0] != "."}
    for name in names:
        assert (here / name).read_bytes() == (there / name).read_bytes()
    with pytest.raises(UserError, match=rf"--output={url}/out holds .* already: give"):
        export(run, f"{url}/out")


@pytest.mark.slow
def test_a_plan_is_written_there(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outputs = (f"--html={url}/a.html", f"--json={url}/a.json")
    words = ("plan", "--config=digits.py", "--topology=attached", *outputs)
    monkeypatch.setattr(sys, "argv", list(words))
    plan()
    assert '"traffic"' in (files.downloaded(url) / "a.json").read_text()
    assert "<html" in (files.downloaded(url) / "a.html").read_text()
