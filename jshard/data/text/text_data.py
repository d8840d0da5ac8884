"""Text as windows of tokens, or as rows of packed documents."""

import dataclasses

import grain

from jshard.data.files.token_forms import DTYPES
from jshard.data.mixture import mix, parse_mixture
from jshard.data.text.corpus import split_corpus
from jshard.data.text.packing import packed_rows
from jshard.data.text.windows import windows
from jshard.data.tokenizers.tokenizer import load_tokenizer
from jshard.storage.hub.online.names import parse
from jshard.system.errors import UserError


def text_data(
    path: str,
    split: str,
    *,
    sequence_length: int,
    seed: int,
    validation_fraction: float = 0.05,
    token_dtype: str = "uint16",
    vocab_size: int | None = None,
    tokenizer: str = "",
    text_key: str = "text",
    pack: bool = False,
    max_segments: int = 0,
    mixture: str = "",
    all_tokens: bool = False,
) -> grain.MapDataset:
    """Returns windows of T = sequence_length tokens of the text at `path`.

    `path` is one of:

    - "": the source code of the running Python's standard library, without its tests
      and tables: about 8 MiB, and no download.
    - A text file, or a folder of text files, read recursively and in sorted order, with
      links followed, but without hidden files and files that are not UTF-8. Each file
      is a document.
    - A file of records, or a folder with such files, whose other files are ignored:
      JSON (`.jsonl`, `.ndjson`, `.json` with an object a line or an array of objects,
      and these with `.gz` or `.zst`), `.csv`, `.tsv`, `.parquet`, `.arrow`, or a folder
      that Hugging Face's `datasets` saved. Each record is a document: a text, under
      `text_key`, or, without one, a chat or a pair of prompt and completion (see
      `jshard.data.files.conversations`).
    - A `.bin` or `.npy` file of integers, or a folder with such files, whose other
      files are ignored. Files are memory-mapped. Headers of llm.c and NumPy, and an
      index of Megatron-LM beside the file, are read; other files hold little-endian
      integers. `python -m jshard.tokenize` writes them.

    All but files of tokens are tokenized now and kept in memory: as bytes, or by
    `tokenizer`, whose end-of-text token then ends each document. With bytes it is a
    zero byte, which text does not contain; a single text file has none.

    The names of a folder's files say its splits, as for Hugging Face's `datasets`: see
    `jshard.data.files.split_names`. Without files for validation, it is
    `validation_fraction` of the files, chosen by a hash of their path in the folder; or
    for tokens, a single file, or files too few for that, the last
    `validation_fraction` of the tokens, in whole records.

    A window of T+1 tokens starts at every T-th token and may span files; the last
    target of a window is the first input of the next. The incomplete last window is
    dropped from the training split, and padded with weights 0 in the validation split.
    With `pack`, an example is a row of whole documents instead; see `packed_rows`.

    Args:
      path: See above.
      split: "train", which repeats forever in a new order each epoch, or "validation",
        which is finite and in order.
      sequence_length: T, in tokens.
      seed: Determines the order of the training split, in [0, 2**32).
      validation_fraction: In [0, 1); with 0 only files named validation are held out.
      token_dtype: The dtype of `.bin` files: "uint16", "uint32", "int32" or "int64".
      vocab_size: If given, tokens must be below it: a sample of every file is checked
        now, other tokens when they are read.
      tokenizer: A `tokenizer.json`, or a folder with one; "" for bytes.
      text_key: The name of the text in a record.
      pack: See above; examples also have "segment_ids" and "positions", int32[T].
      max_segments: The most documents of a packed row, padding included; 0 is any.
      mixture: Several sources in place of `path`, as "PATH:WEIGHT,PATH:WEIGHT"; see
        `mix`.
      all_tokens: Whether all tokens of chats have a weight, not only answers.

    Returns:
      A dataset of {"inputs": int32[T], "targets": int32[T], "weights": float32[T]}.

    Raises:
      UserError: `path` cannot be read as text or tokens, the split is shorter than a
        window, a token is not below `vocab_size`, or another argument is invalid.
    """
    if split not in ("train", "validation"):
        raise UserError(f"split {split!r} is unknown: use 'train' or 'validation'")
    if token_dtype not in DTYPES:
        raise UserError(
            f"data.token_dtype {token_dtype!r} is unknown: use {' or '.join(DTYPES)}"
        )
    if sequence_length < 1:
        raise UserError(f"sequence_length={sequence_length}: use 1 token or more")
    if not 0 <= validation_fraction < 1:
        raise UserError(
            f"data.validation_fraction={validation_fraction}: use a number in [0, 1)"
        )
    if not 0 <= seed < 2**32:
        raise UserError(f"seed={seed}: use a number in [0, 2**32)")
    if max_segments < 0 or max_segments == 1:
        raise UserError(
            f"data.max_segments={max_segments}: padding is one; use 2 or more, or 0 "
            "for any number"
        )
    if path and mixture:
        raise UserError("data.path and data.mixture are both set; leave one out")
    loaded = load_tokenizer(tokenizer, vocab_size)

    def source(path: str, seed: int) -> grain.MapDataset:
        if mixture and not path.startswith("hf:") and parse(path, "stream"):
            raise UserError(
                f"data.mixture: there is no file or folder {path}; if it is a dataset "
                f"on the Hugging Face Hub, stream the mixture: data.dataset={mixture}"
            )
        pieces = split_corpus(
            path,
            validation_fraction=validation_fraction,
            token_dtype=token_dtype,
            tokenizer=loaded,
            text_key=text_key,
        )[split]
        long = split == "train" and not pack
        needed = sequence_length + 1 if long else 2
        if (found := sum(map(len, pieces))) < needed:
            raise UserError(
                f"{path or 'built-in text'}: the {split} split has {found} tokens but "
                f"needs {needed} with sequence_length={sequence_length}; provide more "
                "text, shorten sequence_length or change data.validation_fraction"
            )
        if pack:
            if all_tokens:
                pieces = [dataclasses.replace(piece, trained=None) for piece in pieces]
            dataset = packed_rows(
                pieces,
                sequence_length,
                max_segments=max_segments,
                vocab_size=vocab_size,
            )
        else:
            if chats := [piece.file for piece in pieces if piece.trained is not None]:
                raise UserError(
                    f"{chats[0]}: chats and pairs are trained on as whole documents: "
                    "set --config.data.pack=True"
                )
            dataset = windows(
                pieces, sequence_length, pad=not long, vocab_size=vocab_size
            )
        if split == "validation":
            return dataset
        # Not .shuffle(seed): its epoch e has the order of epoch 0 with seed + e.
        return dataset.seed(seed).shuffle().repeat()

    if not mixture:
        return source(path, seed)
    weights = parse_mixture(mixture, "data.mixture")
    sources = {
        path: source(path, (seed + number) % 2**32)
        for number, path in enumerate(weights)
    }
    return mix(sources, weights)
