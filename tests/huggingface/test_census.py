"""The settings of published models: each is read, or rightly refused.

What a model is said to be is what transformers makes of its files.
"""

import json

import pytest

import jshard
from jshard.data.tokenizers.tokenizer import FileTokenizer, load_tokenizer
from jshard.models import (
    bert_huggingface,
    gpt_huggingface,
    llama_huggingface,
    t5_huggingface,
)
from published import CENSUS, TINY, TOKENIZERS, WORDS

MAPS = {
    "gpt2": gpt_huggingface,
    "bert": bert_huggingface,
    "t5": t5_huggingface,
}


@pytest.mark.parametrize("name", CENSUS)
def test_config_json_of_a_published_model(name, capsys):
    content, expected = CENSUS[name]
    mapped = MAPS.get(str(content.get("model_type")), llama_huggingface)
    if mapped is llama_huggingface:
        content = {**TINY, **content}
    if isinstance(expected, str):
        with pytest.raises(jshard.UserError, match=expected):
            mapped.read_config(content)
        return
    model = mapped.read_config(content)
    assert expected.items() <= model.items()
    written = mapped.write_config(model)
    assert mapped.read_config(written) == model
    assert mapped.tensors(model)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizer_of_a_published_model(name, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    special, config, others, ends, size = TOKENIZERS[name]
    vocabulary = {text: i for i, text in enumerate((*WORDS, *special))}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="a")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for file, content in {"tokenizer_config": config, **others}.items():
        (tmp_path / f"{file}.json").write_text(json.dumps(content))
    ours = load_tokenizer(tmp_path)
    assert isinstance(ours, FileTokenizer)
    assert [ours.bos_id, ours.eos_id, ours.vocab_size] == [*ends, size]
    found = ours.encode("b " + "".join(special) + " c").tolist()
    assert found == [1, *range(3, 3 + len(special)), 2]
    if name.startswith("bert"):
        assert ours.special_tokens["mask_token"] == "[MASK]"
