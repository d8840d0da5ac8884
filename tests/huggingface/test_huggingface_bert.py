"""models/bert.py and its map against transformers: a tiny random model, in torch."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import save_file

import jshard
from exports import load_all
from filled import filled
from foreign_weights import load, randomize, read_tensors
from jshard.export import export
from jshard.models import bert_huggingface as huggingface
from jshard.models.bert import Bert, BertConfig
from jshard.recipe.load import find_recipe, open_recipe
from jshard.recipe.make_config import make_config
from jshard.storage.hub.safetensors_read import load_safetensors
from jshard.training.trainer import Trainer
from parity import make_mesh

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own
    pytest.mark.filterwarnings("ignore:.*of the parameters are in no Stack or Unit"),
]

B, T, V = 8, 24, 300
SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def folder(transformers, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("bert")
    model = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))
    randomize(model).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, T + 1, (B, 1))
    return {
        "tokens": rng.integers(0, V, (B, T)),
        "types": rng.integers(0, 2, (B, T)),
        "mask": (np.arange(T) < lengths).astype(np.int32),
    }


def their_logits(transformers: Any, folder: Path, inputs: dict) -> np.ndarray:
    torch = pytest.importorskip("torch")

    model, info = transformers.BertForMaskedLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    with torch.no_grad():
        logits = model.eval()(
            torch.tensor(inputs["tokens"]),
            attention_mask=torch.tensor(inputs["mask"]),
            token_type_ids=torch.tensor(inputs["types"]),
        ).logits
    return logits.numpy()


def our_logits(model: Bert, batch: dict) -> Any:
    return model(
        batch["tokens"], token_types_BT=batch["types"], segment_ids_BT=batch["mask"]
    )


def test_logits_are_those_of_transformers(transformers, folder, inputs):
    want = their_logits(transformers, folder, inputs)
    keys = huggingface.read_config(json.loads((folder / "config.json").read_text()))
    model = filled(lambda: Bert(BertConfig(**keys), rngs=nnx.Rngs(0)))
    load(model, read_tensors(folder), huggingface.tensors(keys))
    real = inputs["mask"] > 0
    assert np.std(want) > 0.1

    def check(got: Any) -> None:
        worst = np.max(np.abs(np.asarray(got) - want)[real])
        print(f"largest difference {worst:.1e} of {np.max(np.abs(want)):.1f}")
        assert worst <= 1e-5 * np.max(np.abs(want))

    with jax.default_matmul_precision("highest"):
        check(nnx.jit(our_logits)(model, inputs))
        for replica in (1, 2):
            fsdp = jshard.FSDP(
                make_mesh(replica, 8 // replica), jshard.Policy(min_shard_elements=0)
            )
            state = fsdp.from_model(model, optax.identity())
            predict = fsdp.predict_step(our_logits)
            check(fsdp.fetch(predict(state, fsdp.shard_batch(inputs))))


def test_a_run_from_a_folder_is_exported_as_it_was(
    transformers, folder, inputs, tmp_path
):
    (tmp_path / "text.txt").write_text("to be, or not to be, that is the question" * 40)
    given = {
        "steps": 1,
        "batch_size": 8,
        "eval_every": 0,
        "optimizer.learning_rate": 0.0,
        "data.path": tmp_path / "text.txt",
        "model.from": folder,
        "checkpoint.restore": folder,
        "mesh.replica": 2,
        "policy.min_shard_elements": 0,
    }
    with open_recipe(find_recipe("bert.py")) as recipe:
        config = make_config(recipe, given)
        Trainer(recipe, config=config, workdir=tmp_path / "run").fit()
    export(tmp_path / "run", tmp_path / "out", format="huggingface")
    want, got = load_all(folder), load_all(tmp_path / "out")
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert got[name].tobytes() == array.tobytes(), name
    before = their_logits(transformers, folder, inputs)
    after = their_logits(transformers, tmp_path / "out", inputs)
    np.testing.assert_array_equal(after, before)
    first, second = (
        huggingface.read_config(json.loads((x / "config.json").read_text()))
        for x in (folder, tmp_path / "out")
    )
    assert first == second


def test_the_names_that_google_has_published_are_read(folder, tmp_path):
    """Norms with gamma and beta, and the pooler and the head of another task."""
    norms = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    published = {}
    for name, array in read_tensors(folder).items():
        for new, old in norms.items():
            name = name.replace(new, old)
        published[name] = array
    published["bert.pooler.dense.weight"] = np.ones((32, 32), np.float32)
    published["bert.pooler.dense.bias"] = np.ones(32, np.float32)
    published["cls.seq_relationship.weight"] = np.ones((2, 32), np.float32)
    published["cls.seq_relationship.bias"] = np.ones(2, np.float32)
    save_file(published, tmp_path / "model.safetensors")
    keys = huggingface.read_config(json.loads((folder / "config.json").read_text()))
    fsdp = jshard.FSDP(jshard.make_mesh(), jshard.Policy(min_shard_elements=0))

    def read(path: Path, pooler: bool) -> dict[str, jax.Array]:
        model = {**keys, "pooler": pooler}
        state = fsdp.abstract_state(
            lambda rngs: Bert(BertConfig(**model), rngs=rngs), optax.identity()
        )
        return load_safetensors(path, state, huggingface.tensors(model))

    want, got = read(folder, False), read(tmp_path, False)
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array)
    pooled = read(tmp_path, True)
    assert pooled.keys() - want.keys() == {
        "params.pooler.bias",
        "params.pooler.kernel",
    }
