"""Learns the tokens of the quick start: jshard/data/tokenizers/python_pieces.json.

    python benchmarks/pieces.py [--vocab_size=1024]

merges the most frequent pair of neighbouring pieces in Python's standard library to a
new piece, again and again (byte-pair encoding: Sennrich et al. 2016, arXiv:1508.07909),
and prints how many bytes a token of held-out files has.
"""

import argparse
import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

from jshard.data.text.corpus import split_corpus
from jshard.data.tokenizers import byte_pieces as pieces

FILE = Path(pieces.__file__).parent / pieces.PYTHON
RARE = 2  # words that are not more frequent are left out


def learn(text: bytes, vocab_size: int) -> list[bytes]:
    """Returns the tokens after those of single bytes, in the order of their merges."""
    counts = Counter(pieces.WORD.findall(text))
    words = {w: [bytes([b]) for b in w] for w, n in counts.items() if n > RARE}
    pairs, having = Counter(), defaultdict(set)  # how often; in which words
    for word, parts in words.items():
        for pair in pairwise(parts):
            pairs[pair] += counts[word]
            having[pair].add(word)
    found = dict.fromkeys(pieces.BYTES)
    while len(found) < vocab_size:
        best = max(pairs, key=pairs.__getitem__)
        found[b"".join(best)] = None
        for word in having.pop(best):
            for pair in pairwise(words[word]):
                pairs[pair] -= counts[word]
            words[word] = merged(words[word], best)
            for pair in pairwise(words[word]):
                pairs[pair] += counts[word]
                having[pair].add(word)
    return list(found)[len(pieces.BYTES) :]


def merged(parts: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    """Returns the parts of a word with each occurrence of a pair as one."""
    out: list[bytes] = []
    for part in parts:
        if out and (out[-1], part) == pair:
            out[-1] += part
        else:
            out.append(part)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab_size", type=int, default=1024)
    vocab_size = parser.parse_args().vocab_size
    splits = split_corpus("", validation_fraction=0.05, token_dtype="uint16")
    text = {
        split: b"".join(piece.load().tobytes() for piece in found)
        for split, found in splits.items()
    }
    learned = learn(text["train"].replace(b"\0", b" "), vocab_size)
    lines = json.dumps([piece.decode("latin-1") for piece in learned])
    FILE.write_text(lines + "\n")
    tokens = pieces.PieceTokenizer(learned).encode(text["validation"].decode())
    print(f"{FILE}: {len(text['validation']) / len(tokens):.3f} bytes a token")


if __name__ == "__main__":
    main()
