"""Token files of a corpus, written by several processes, resumable.

The corpus is divided into parts of about 64 MiB, whatever the number of processes. Each
part becomes a file of tokens and one of the ends of its documents, which appear when
they are complete; so a command that was killed continues with the parts that are not
there, and ends with the same bytes.
"""

import contextlib
import functools
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from jshard.data.files.conversations import PAIR, SAID
from jshard.data.files.record_forms import has_records
from jshard.data.files.split_names import named_splits, split_of
from jshard.data.files.token_forms import HEADER_BYTES
from jshard.data.text.corpus import UNFINISHED, corpus_files
from jshard.data.text.encoded import TEXT_BYTES, conversation_form, encode_slices
from jshard.data.text.records import Slice, cut
from jshard.data.text.token_files import ENDS, TOKENS, TRAINED, make_header
from jshard.data.tokenizers.chat import load_chat
from jshard.data.tokenizers.tokenizer import load_tokenizer
from jshard.storage.checkpoint.buckets.files import cached
from jshard.storage.hub.online.download import pin
from jshard.storage.hub.online.outputs import names_at, upload
from jshard.system.cli.paths import is_remote
from jshard.system.cli.terminal import show
from jshard.system.errors import RunFailed, UserError
from jshard.system.files.atomic import replace_file, replacing
from jshard.system.files.untrusted import read_json

ABOUT = "tokens.json"
PART_BYTES = 2**26
_PAUSE = 10.0  # seconds between lines


class _Part(NamedTuple):
    """Slices that become one file."""

    name: str  # of the file, without its suffix
    slices: list[Slice]  # what it consists of

    @property
    def size(self) -> int:
        """Bytes of the corpus."""
        return sum(piece.size for piece in self.slices)


def write_token_files(
    inputs: Sequence[Path | str],
    tokenizer: Path | str,
    output: Path | str,
    *,
    text_key: str = "text",
    workers: int = 1,
    part_bytes: int = PART_BYTES,
) -> None:
    """Writes the tokens of documents to `output`, for `text_data`.

    `train-00000.bin` and so on hold tokens, in uint16 if the tokenizer has at most
    65,536 and else in uint32, after llm.c's header; `train-00000.idx` holds the token
    after the last of each document in uint64. Of chats, `train-00000.trained` holds a
    byte for each token: 1 if an assistant wrote it. Files named as validation data, as
    for `text_data`, become `val-00000.bin`. `tokens.json` says what they were made of.

    Args:
      inputs: Files or folders, or URLs of some, as for `text_data`.
      tokenizer: A `tokenizer.json`, or a folder or a Hugging Face name with one.
      output: A folder; new, empty, or left by the same call when it was killed. Or a
        URL without files: they are written to the cache and uploaded at the end.
      text_key: The text of a record.
      workers: Processes that tokenize.
      part_bytes: About how much of the corpus becomes one file.

    Raises:
      UserError: The inputs or the tokenizer cannot be read, or `output` holds something
        else.
    """
    tokenizer = pin(str(tokenizer))
    loaded = load_tokenizer(tokenizer)
    files = _in_splits(dict(x for path in inputs for x in corpus_files(path)))
    parts = _plan(files, part_bytes)
    about = {
        "tokenizer": loaded.digest,
        "vocab_size": loaded.vocab_size,
        "eos_id": loaded.eos_id,
        "dtype": loaded.dtype.name,
        "text_key": text_key,
        "part_bytes": part_bytes,
        "files": {
            str(file.resolve()): [file.stat().st_size, file.stat().st_mtime_ns]
            for file in files
        },
    }
    forms = {
        file: form for file in files if (form := conversation_form(file, text_key))
    }
    for file, form in forms.items():
        show(f"{file}: {SAID[form]}")
    if set(forms.values()) - {PAIR}:
        about["chat_template"] = load_chat(loaded, "--tokenizer").digest
    folder = (cached(output) if is_remote(output) else Path(output)) / UNFINISHED
    if is_remote(output) and (there := names_at(output)):
        raise UserError(f"--output={output} holds {there[0]}; give another folder")
    if not _begin(folder, about):
        show(f"{output} is complete already")
        return
    missing = [part for part in parts if _find(folder, part.name) is None]
    write = functools.partial(
        _write_part, folder=folder, tokenizer=tokenizer, text_key=text_key
    )
    started = time.perf_counter()
    with _progress(parts, missing) as advance:
        for part in _write_all(missing, workers, write):
            advance(part)
    seconds = time.perf_counter() - started
    counts = [_count(folder, part) for part in parts]
    tokens, documents = (sum(count[i] for count in counts) for i in range(2))
    if not tokens:
        shutil.rmtree(folder)
        raise UserError(f"{inputs[0]}: has no text")
    _finish(folder, output, {**about, "tokens": tokens, "documents": documents})
    size = sum(part.size for part in missing) / 1e6
    show(
        f"tokenized {size:,.1f} MB in {seconds:,.1f} s, {size / seconds:.2f} MB/s; "
        f"{output} holds {tokens:,} tokens of {documents:,} documents in "
        f"{loaded.dtype}"
    )
    show(
        f"train on them: --config.data.path={output} "
        f"--config.data.token_dtype={loaded.dtype} --config.data.tokenizer={tokenizer}"
        + " --config.data.pack=True"
        * bool(forms)
    )


def _in_splits(files: Mapping[Path, str]) -> dict[Path, str]:
    """Returns "train" or "val" of files by their names, without those of neither."""
    names = list(files.values())
    if {split_of(name) for name in names} == {"validation"}:
        return dict.fromkeys(files, "val")
    if len(names) == 1:
        return dict.fromkeys(files, "train")
    splits = named_splits(names)
    if splits.left_out:
        show(str(splits))
    of_name = dict.fromkeys(splits.train, "train")
    of_name |= dict.fromkeys(splits.validation, "val")
    return {file: of_name[name] for file, name in files.items() if name in of_name}


def _plan(files: Mapping[Path, str], part_bytes: int) -> list[_Part]:
    """Divides files, each with its split, into parts; depends on their sizes alone."""
    slices: dict[str, list[Slice]] = {"train": [], "val": []}
    for file, split in files.items():
        most = part_bytes if has_records(file) else min(TEXT_BYTES, part_bytes)
        slices[split] += cut(file, most)
    parts = []
    for split, pieces in slices.items():
        groups: list[list[Slice]] = []
        room = 0
        for piece in pieces:
            if piece.size > room or not groups:
                groups.append([])
                room = part_bytes
            groups[-1].append(piece)
            room -= piece.size
        parts += [_Part(f"{split}-{i:05}", group) for i, group in enumerate(groups)]
    return parts


def _begin(folder: Path, about: dict[str, Any]) -> bool:
    """Prepares the folder of an unfinished corpus; False if it is finished."""
    output = folder.parent
    for place in (output, folder):
        try:
            found = dict(read_json(place / ABOUT))
        except FileNotFoundError:
            continue
        except (ValueError, TypeError) as error:
            raise UserError(f"{place / ABOUT}: cannot be read: {error}") from error
        if other := [key for key in about if about[key] != found.get(key)]:
            raise UserError(
                f"--output={output} holds tokens made with another {other[0]}; give "
                "another folder, or remove it"
            )
        if place == output:
            shutil.rmtree(folder, ignore_errors=True)
        return place == folder
    if output.exists() and (there := sorted(output.glob("*.bin"))):
        raise UserError(f"--output={output} holds {there[0].name}; give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / ABOUT, json.dumps(about, indent=1))
    return True


def _finish(folder: Path, output: Path | str, about: dict[str, Any]) -> None:
    """Moves the files of all parts to their place."""
    text = json.dumps(about, indent=1)
    if is_remote(output):
        replace_file(folder / ABOUT, text)
        upload(folder, output, last=ABOUT)
    else:
        for file in sorted(folder.iterdir()):
            if file.suffix in (TOKENS, ENDS, TRAINED):
                file.rename(folder.parent / file.name)
        replace_file(folder.parent / ABOUT, text)
    shutil.rmtree(folder)


def _find(folder: Path, name: str) -> Path | None:
    """Returns a part's file of ends: the last to be written, perhaps moved already."""
    for place in (folder, folder.parent):
        if (file := place / f"{name}{ENDS}").exists():
            return file
    return None


def _count(folder: Path, part: _Part) -> tuple[int, int]:
    """Returns how many tokens and documents a part has."""
    file = _find(folder, part.name)
    assert file is not None
    ends = np.fromfile(file, "<u8")
    return int(ends[-1]) if len(ends) else 0, len(ends)


def _write_all(
    parts: Sequence[_Part], workers: int, write: Callable[[_Part], _Part]
) -> Iterator[_Part]:
    """Yields parts as they are written, by several processes."""
    processes = min(workers, len(parts))
    if processes <= 1:
        yield from map(write, parts)
        return
    with ProcessPoolExecutor(
        processes,
        multiprocessing.get_context("spawn"),
        _start_worker,
        (str(max(1, workers // processes)),),
    ) as pool:
        try:
            for future in as_completed([pool.submit(write, part) for part in parts]):
                yield future.result()
        except BrokenProcessPool as error:
            raise RunFailed(
                "a worker was killed, perhaps for its memory; run the command again to "
                "continue, with fewer --workers"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _start_worker(threads: str) -> None:
    os.environ["RAYON_NUM_THREADS"] = threads  # of the tokenizer, in this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)  # the parent was killed

    threading.Thread(target=follow, daemon=True).start()


def _write_part(part: _Part, folder: Path, tokenizer: str, text_key: str) -> _Part:
    """Writes the tokens of a part, its targets, and then the ends of its documents."""
    loaded = load_tokenizer(tokenizer)
    tokens = folder / f"{part.name}{TOKENS}"
    lengths, targets = [], []
    with replacing(tokens) as stream:
        stream.write(bytes(HEADER_BYTES))
        for document in encode_slices(part.slices, loaded, text_key):
            lengths.append(len(document.tokens))
            targets.append(document.trained)
            little = document.tokens.dtype.newbyteorder("<")
            stream.write(document.tokens.astype(little).tobytes())
        stream.seek(0)
        stream.write(make_header(loaded.dtype.name, sum(lengths)))
    if not lengths:
        tokens.unlink()
    if any(trained is not None for trained in targets):
        with replacing(tokens.with_suffix(TRAINED)) as stream:
            for length, trained in zip(lengths, targets, strict=True):
                trained = np.ones(length, bool) if trained is None else trained
                stream.write(trained.tobytes())
    with replacing(tokens.with_suffix(ENDS)) as stream:
        stream.write(np.cumsum(lengths, dtype="<u8").tobytes())
    return part


@contextlib.contextmanager
def _progress(
    parts: Sequence[_Part], missing: Sequence[_Part]
) -> Iterator[Callable[[_Part], None]]:
    """Shows how much is done: a bar on a terminal, else a line now and then."""
    total = sum(part.size for part in parts)
    done = total - sum(part.size for part in missing)
    if done:
        show(f"continuing: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB are there")
    console = Console(stderr=True)
    columns = (
        TextColumn("tokenizing"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, completed=done)
        shown = time.monotonic()

        def advance(part: _Part) -> None:
            nonlocal done, shown
            done += part.size
            bar.advance(task, part.size)
            if not console.is_terminal and time.monotonic() - shown > _PAUSE:
                shown = time.monotonic()
                show(f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB")

        yield advance
