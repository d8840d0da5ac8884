"""What a sample begins with: the prompt that is set, or the data's own words."""

import json

import numpy as np
import pytest

from jshard.recipe.config.run_config import complete
from jshard.recipe.load import find_recipe, open_recipe

TEXT = "Der Hund schläft. " * 40


def prompt_of(name: str = "gpt.py", **keys) -> str:
    """Returns the prompt of a recipe's sample, read as bytes."""
    with open_recipe(find_recipe(name)) as recipe:
        config = complete(recipe.get_config(), recipe.name)
        config.data.tokenizer, config.model.vocab_size = "", 256
        with config.unlocked():
            config.update_from_flattened_dict(keys)
        assert recipe.sample is not None
        _, batch, decode = recipe.sample(config) or pytest.fail("no sample")
        assert batch["tokens"].dtype == np.int32
        return decode(batch["tokens"][0])


def write(folder, *records: dict) -> str:
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def test_the_quick_start_begins_a_class_and_a_prompt_is_taken_as_it_is():
    assert prompt_of() == "class Parser:\n    def"
    assert prompt_of(**{"data.path": "nowhere", "sample.prompt": "It"}) == "It"


@pytest.mark.parametrize("name", ["gpt.py", "finetune.py", "gpt2_124m.py"])
def test_a_sample_begins_as_the_validation_text_does(tmp_path, name):
    (tmp_path / "train.txt").write_text("No.\n" * 500)
    (tmp_path / "validation.txt").write_text(TEXT)
    sizes = {"model.sequence_length": 32, "data.path": str(tmp_path)}
    if name == "finetune.py":
        sizes["data.sequence_length"] = 32
    assert prompt_of(name, **sizes).encode() == TEXT.encode()[:16]
    assert prompt_of(name, **sizes, eval_every=0) == "The "


def test_of_a_packed_row_it_is_the_first_document_alone(tmp_path):
    path = write(tmp_path, *[{"text": "Ja."}] * 40)
    keys = {"data.path": path, "data.pack": True, "model.sequence_length": 8}
    assert prompt_of(**keys) in ("Ja.", "Ja.\0")


def test_of_preferences_it_is_a_prompt_with_the_chosen_answer(tmp_path):
    pair = {"prompt": "Was? ", "chosen": "Ein Hund, ja.", "rejected": "Nein."}
    path = write(tmp_path, *[pair] * 40)
    keys = {"data.path": path, "data.sequence_length": 32, "model.sequence_length": 32}
    assert prompt_of("preference.py", **keys) == "Was? Ein Hund, j"
