"""MB/s of `python -m jshard.tokenize`, beside those of `tokenizers` itself.

    python benchmarks/tokenizing.py TOKENIZER [--megabytes=64] [--repeats=3]

The text is the source of Python's standard library, as JSONL with a file a record,
again and again until it is long enough. `jshard.tokenize` reads it with one worker, of
one thread and of all, and with two; `encode_batch` and `encode_batch_fast` get the same
texts from memory, with all threads. Each is timed `--repeats` times in turn, and the
best counts.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

BATCH = 256  # texts a call, a few MB


def documents(megabytes: float) -> list[str]:
    """Returns texts of about that size together."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [f for f in sorted(library.rglob("*.py")) if "site-packages" not in f.parts]
    texts = [file.read_text(encoding="utf-8", errors="ignore") for file in files]
    size = sum(len(text.encode()) for text in texts)
    texts *= int(megabytes * 1e6 // size) + 1
    total, found = 0, []
    for text in texts:
        if total > megabytes * 1e6:
            break
        found.append(text)
        total += len(text.encode())
    return found


def tokenized(tokenizer: Path, corpus: Path, workers: int, threads: int = 0) -> float:
    """Returns the MB/s that the command prints."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "jshard.tokenize", str(corpus)),
                *(f"--tokenizer={tokenizer}", f"--output={folder}/tokens"),
                f"--workers={workers}",
            ],
            env=os.environ | ({"RAYON_NUM_THREADS": str(threads)} if threads else {}),
            check=True,
            capture_output=True,
            text=True,
        )
    found = re.search(r"([\d.]+) MB/s", done.stdout)
    assert found, done.stdout
    return float(found[1])


def encoded(tokenizer: Path, texts: list[str], method: str) -> float:
    """Returns the MB/s of the library alone, from memory to lists of ids."""
    from tokenizers import Tokenizer

    encode = getattr(Tokenizer.from_file(str(tokenizer / "tokenizer.json")), method)
    size, started = sum(len(text.encode()) for text in texts), time.perf_counter()
    for start in range(0, len(texts), BATCH):
        for document in encode(texts[start : start + BATCH]):
            assert document.ids is not None
    return size / 1e6 / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokenizer", type=Path, help="a folder with tokenizer.json")
    parser.add_argument("--megabytes", type=float, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    texts, tokenizer = documents(arguments.megabytes), arguments.tokenizer
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder)
        for part in range(4):  # files are what workers share
            lines = [json.dumps({"text": text}) + "\n" for text in texts[part::4]]
            (corpus / f"{part}.jsonl").write_text("".join(lines))
        ways = {
            "jshard.tokenize, 1 worker of 1 thread": lambda: tokenized(
                tokenizer, corpus, 1, threads=1
            ),
            "jshard.tokenize, 1 worker": lambda: tokenized(tokenizer, corpus, 1),
            "jshard.tokenize, 2 workers": lambda: tokenized(tokenizer, corpus, 2),
            "tokenizers, encode_batch": lambda: encoded(
                tokenizer, texts, "encode_batch"
            ),
            "tokenizers, encode_batch_fast": lambda: encoded(
                tokenizer, texts, "encode_batch_fast"
            ),
        }
        best = dict.fromkeys(ways, 0.0)
        for _ in range(arguments.repeats):
            for name, run in ways.items():
                best[name] = max(best[name], run())
    size = sum(len(text.encode()) for text in texts) / 1e6
    print(f"{len(texts)} documents, {size:.1f} MB; {os.cpu_count()} cores")
    for name, speed in best.items():
        print(f"{name:40} {speed:6.2f} MB/s")


if __name__ == "__main__":
    main()
