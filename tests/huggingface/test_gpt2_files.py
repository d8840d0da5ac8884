"""GPT-2's files with and without a prefix of names, and with masks among them.

openai-community/gpt2 has neither the prefix nor a head, and a causal mask a layer.
"""

from pathlib import Path

import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import save_file

import jshard
from exports import load_all
from filled import filled
from foreign_weights import randomize, store
from jshard.export import export
from jshard.models import gpt_huggingface as huggingface
from jshard.models.gpt import GPT, GPTConfig
from jshard.recipe.load import find_recipe, open_recipe
from jshard.recipe.make_config import make_config
from jshard.storage.hub.safetensors_read import load_safetensors
from jshard.training.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own

V, T = 256, 16
SIZES = GPTConfig(vocab_size=V, sequence_length=32, num_layers=2, num_heads=2, width=16)
PREFIX = "transformer."
FROM = ("model.from", "checkpoint.restore")
KEYS = {
    "steps": 1,
    "batch_size": 8,
    "eval_every": 0,
    "sample.length": 0,
    "optimizer.learning_rate": 0.0,
    "policy.min_shard_elements": 0,
}


def write(file: Path, tensors: dict[str, np.ndarray]) -> Path:
    save_file(tensors, file, {"format": "pt"})
    return file


def test_names_without_the_prefix_and_masks_are_those_of_the_model(tmp_path):
    model = filled(lambda: GPT(SIZES, rngs=nnx.Rngs(0)))
    places = huggingface.tensors(vars(SIZES))
    tensors = store(model, places)
    short = {name.removeprefix(PREFIX): x for name, x in tensors.items()}
    mask = np.tri(32, dtype=np.float32)[None, None]
    masks = {f"h.{i}.attn.bias": mask for i in range(SIZES.num_layers)}
    fsdp = jshard.FSDP(jshard.make_mesh(), jshard.Policy(min_shard_elements=0))
    state = fsdp.abstract_state(lambda rngs: GPT(SIZES, rngs=rngs), optax.identity())
    want, got = (
        load_safetensors(write(tmp_path / f"{name}.safetensors", files), state, places)
        for name, files in {"plain": tensors, "hub": short | masks}.items()
    )
    assert len(want) == 16
    for name, array in want.items():
        np.testing.assert_array_equal(array, got[name])

    del short["h.1.ln_1.bias"]
    damaged = write(tmp_path / "damaged.safetensors", short)
    with pytest.raises(jshard.UserError, match=r": transformer\.h\.1\.ln_1\.bias is m"):
        load_safetensors(damaged, state, places)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPT2Model", "GPT2LMHeadModel"])
def test_a_folder_of_transformers_comes_back_as_it_loads_it(tmp_path, name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=V, n_positions=32, n_layer=2, n_head=2, n_embd=16,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = randomize(getattr(transformers, name)(config))
    model.save_pretrained(tmp_path / "hf")
    prefixed = [key.startswith(PREFIX) for key in load_all(tmp_path / "hf")]
    assert set(prefixed) == {name == "GPT2LMHeadModel"}

    (tmp_path / "text.txt").write_text("to be, or not to be, that is the question" * 9)
    given = KEYS | dict.fromkeys(FROM, tmp_path / "hf")
    given |= {"data.path": tmp_path / "text.txt", "data.tokenizer": ""}
    with open_recipe(find_recipe("gpt.py")) as recipe:
        config = make_config(recipe, given)
        Trainer(recipe, config=config, workdir=tmp_path / "run").fit()
    export(tmp_path / "run", tmp_path / "out", format="huggingface")
    found = {}
    for folder in ("hf", "out"):
        found[folder], loading = transformers.GPT2LMHeadModel.from_pretrained(
            tmp_path / folder, output_loading_info=True
        )
        assert not any(loading.values()), loading
    want, got = (load_all(tmp_path / folder) for folder in ("hf", "out"))
    for tensor, array in want.items():
        assert got[PREFIX + tensor.removeprefix(PREFIX)].tobytes() == array.tobytes()
    tokens = torch.tensor(np.random.default_rng(0).integers(0, V, (2, T)))
    with torch.no_grad():
        logits = [found[folder].eval()(tokens).logits for folder in ("hf", "out")]
    assert torch.equal(*logits)
