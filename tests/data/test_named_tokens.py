"""Tokens and settings in the files beside a tokenizer.json, by transformers' rules."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jshard.data.tokenizers.tokenizer import FileTokenizer, load_tokenizer
from jshard.system.errors import UserError
from small_tokenizer import EOS, TEXT, make_tokenizer

pytest.importorskip("tokenizers")

NEXT = 350  # the number of the first token that tokenizer.json lacks


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("source")) / "tokenizer.json"


@pytest.fixture
def folder(source, tmp_path):
    """Makes the folder of a tokenizer; `files` are JSON by name."""

    def make(said: dict[str, Any] | None, /, **files: Any) -> Path:
        found = {} if said is None else {"tokenizer_config": said}
        for name, content in {**found, **files}.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        shutil.copy(source, tmp_path)
        return tmp_path

    return make


def test_named_tokens_that_tokenizer_json_lacks_are_added_in_transformers_order(folder):
    config = {"pad_token": "<p>", "eos_token": "<e>", "image_token": "<i>"}
    more = {"additional_special_tokens": ["<x>", {"content": "<y>", "lstrip": True}]}
    tokenizer = load_tokenizer(folder({**config, **more}))
    numbers = {"<e>": NEXT, "<p>": NEXT + 1, "<i>": NEXT + 2, "<x>": NEXT + 3}
    for text, number in numbers.items():
        assert tokenizer.encode(text).tolist() == [number]
    assert tokenizer.encode("a  <y>").tolist()[1:] == [NEXT + 4]  # with the spaces
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (NEXT, NEXT + 5)
    (document,) = tokenizer.encode_documents(["a"])
    assert document[-1] == NEXT
    assert tokenizer.decode(document) == "a"


def test_older_files_count_where_tokenizer_config_numbers_no_tokens(folder):
    older: dict[str, Any] = {
        "special_tokens_map": {"eos_token": {"content": "<|im_end|>"}},
        "added_tokens": {"<b>": NEXT + 1, "<a>": NEXT},
    }
    tokenizer = load_tokenizer(folder({"eos_token": EOS}, **older))
    assert tokenizer.eos_id == 3
    assert tokenizer.encode("<a><b>").tolist() == [NEXT, NEXT + 1]
    assert tokenizer.decode(np.array([NEXT])) == "<a>"  # not special


def test_tokens_that_tokenizer_config_numbers_make_it_the_only_file(folder):
    numbered = {
        "351": {"content": "<b>", "special": True},
        "350": {"content": "<a>", "special": False, "normalized": True},
    }
    config = {"eos_token": EOS, "added_tokens_decoder": numbered}
    older: dict[str, Any] = {
        "special_tokens_map": {"eos_token": "<|im_end|>"},
        "added_tokens": {"<c>": NEXT},
    }
    tokenizer = load_tokenizer(folder(config, **older))
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (0, NEXT + 2)
    assert tokenizer.decode(tokenizer.encode("<a><b>")) == "<a>"


def test_extra_special_tokens_are_a_list_or_have_names(folder):
    for extra in (["<x>"], {"tool": "<x>"}):
        load_tokenizer.__globals__["_load"].cache_clear()
        tokenizer = load_tokenizer(folder({"extra_special_tokens": extra}))
        assert tokenizer.encode("<x>").tolist() == [NEXT]
    assert isinstance(tokenizer, FileTokenizer)
    assert tokenizer.special_tokens["tool"] == "<x>"


@pytest.mark.parametrize(
    ("config", "model", "eos"),
    [
        ({"tokenizer_class": "GPT2TokenizerFast"}, {}, 0),
        ({}, {"model_type": "gpt2"}, 0),
        (None, {"model_type": "qwen2"}, 0),
        ({"tokenizer_class": "GPT2Tokenizer", "eos_token": None}, {}, None),
        ({"tokenizer_class": "LlamaTokenizer"}, {}, None),  # it has no "</s>"
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, {"model_type": "gpt2"}, None),
    ],
)
def test_a_class_names_tokens_that_no_file_names(folder, config, model, eos):
    tokenizer = load_tokenizer(folder(config, config=model))
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (eos, NEXT)


def test_settings_change_what_tokenizer_json_does(folder):
    def tokens(text, **config):
        load_tokenizer.__globals__["_load"].cache_clear()
        return load_tokenizer(folder(config)).encode(text).tolist()

    plain, spaced = tokens("the"), tokens(" the")
    assert plain != spaced
    for name, expected in (("GPT2Tokenizer", spaced), ("TokenizersBackend", plain)):
        assert tokens("the", tokenizer_class=name, add_prefix_space=True) == expected
    assert tokens(EOS) == [0]
    assert len(tokens(EOS, split_special_tokens=True)) > 1
    with pytest.raises(UserError, match="add_prefix_space is 'yes', not true or false"):
        tokens("the", tokenizer_class="GPT2Tokenizer", add_prefix_space="yes")


def test_settings_of_words_and_of_pieces(tmp_path):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "A": 2}))
    words.normalizer = normalizers.BertNormalizer(lowercase=True)
    pieces = Tokenizer(models.BPE({"a": 0, "▁": 1, "▁a": 2}, [("▁", "a")]))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    cases = (
        (words, {"tokenizer_class": "BertTokenizer"}, "A", [1]),
        (words, {"tokenizer_class": "BertTokenizer", "do_lower_case": False}, "A", [2]),
        (pieces, {"tokenizer_class": "LlamaTokenizer"}, "a", [2]),
        (
            pieces,
            {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False},
            "a",
            [0],
        ),
    )
    for number, (tokenizer, config, text, ids) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        assert load_tokenizer(folder).encode(text).tolist() == ids


def test_an_added_token_that_the_model_lacks_is_refused_in_texts_alone(folder):
    path = folder({"image_token": "<image>", "eos_token": EOS})
    tokenizer = load_tokenizer(path, NEXT)  # as Gemma 3 1B has it
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    message = r"a text holds '<image>', token 350 of .*, and the model has 350 tokens"
    for read in (tokenizer.encode, lambda text: tokenizer.encode_documents([text])):
        with pytest.raises(UserError, match=message):
            read("a <image>")
    assert load_tokenizer(path, NEXT + 1).encode("<image>").tolist() == [NEXT]


def test_the_end_of_documents_may_not_be_beyond_the_model(folder):
    with pytest.raises(UserError, match=r"has 351 tokens, more than model\.vocab"):
        load_tokenizer(folder({"eos_token": "<e>"}), NEXT)


def test_token_files_know_a_tokenizer_that_other_files_changed(folder):
    digests = []
    for config in ({}, {"eos_token": EOS}, {"eos_token": "<e>"}):
        load_tokenizer.__globals__["_load"].cache_clear()
        digests.append(load_tokenizer(folder(config)).digest)
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eos_token": 3}, "tokenizer_config.json: eos_token is '3', not a text"),
        ({"eos_token": "\ud800"}, "eos_token is .*ud800.*, not a text"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder has no tokens by their"),
        ({"added_tokens_decoder": {"x": {}}}, "added_tokens_decoder has no tokens by"),
        ({"added_tokens_decoder": {"1": {}}}, "added_tokens_decoder is '{}', not a"),
        ({"additional_special_tokens": [[]]}, r"special_tokens is '\[\]', not a text"),
    ],
)
def test_what_is_no_token_is_one_line(folder, config, message):
    with pytest.raises(UserError, match=message):
        load_tokenizer(folder(config))


def test_a_pointer_of_git_lfs_is_one_line(folder):
    path = folder({})
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (path / "tokenizer.json").write_text(pointer)
    with pytest.raises(UserError, match="run git lfs pull in its folder"):
        load_tokenizer(path)
