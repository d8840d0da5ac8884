"""What transformers and we make of a drawn config.json."""

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from drawn_configs import FAMILIES, INERT, SIZE, B, T, V, config_json
from flax import nnx

import jshard
from filled import filled
from foreign_weights import load, randomize, read_tensors


def batch_of(family: str, content: dict[str, Any]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    if family in ("ViT", "RegNet", "ResNet"):
        shape = (B, SIZE, SIZE, content.get("num_channels") or 3)
        return {"image": rng.normal(size=shape).astype(np.float32)}
    return {name: rng.integers(0, V, (B, T)) for name in ("tokens", "inputs")}


def their_logits(
    family: str, content: dict[str, Any], folder: Path
) -> np.ndarray | Exception:
    """What transformers makes of a config.json; its model is written to ``folder``."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    drawn, batch = FAMILIES[family], batch_of(family, content)
    source = folder / "source"
    source.mkdir(parents=True)
    (source / "config.json").write_text(json.dumps(content))
    with quiet():
        try:
            config = transformers.AutoConfig.from_pretrained(source)
            config._attn_implementation = "eager"  # the others have no soft cap
            model = getattr(transformers, drawn.architecture)._from_config(config)
            if not getattr(config, "scale_decoder_outputs", True):
                # transformers 5 ties the head of every new T5.
                head = torch.zeros_like(model.lm_head.weight)
                model.lm_head.weight = torch.nn.Parameter(head)
            with torch.no_grad():
                randomize(model)
                for name, value in model.named_buffers():
                    if "running" in name:
                        value.copy_(torch.rand_like(value) + ("var" in name))
                inputs = {k: torch.tensor(v) for k, v in batch.items()}
                if family == "T5":
                    out = model(inputs["inputs"], decoder_input_ids=inputs["tokens"])
                elif "image" in inputs:
                    out = model(inputs["image"].permute(0, 3, 1, 2))
                else:
                    out = model(inputs["tokens"])
            model.save_pretrained(folder)
        except Exception as error:  # any is a refusal
            return error
    return out.logits.numpy()


def read(family: str, content: dict[str, Any]) -> dict[str, Any]:
    """The keys of our model's config; a UserError if the settings are refused."""
    keys = FAMILIES[family].map.read_config(content)
    FAMILIES[family].config(**keys)
    return keys


def our_logits(family: str, content: dict[str, Any], folder: Path) -> np.ndarray:
    """What our model makes of a config.json, with the weights in ``folder``.

    Raises:
      UserError: The settings are refused.
    """
    drawn, batch = FAMILIES[family], batch_of(family, content)
    keys = read(family, content)
    model = filled(lambda: drawn.model(drawn.config(**keys), rngs=nnx.Rngs(0)))
    model.eval()
    files = {
        name: array
        for name, array in read_tensors(folder).items()
        if not name.endswith("num_batches_tracked")
    }
    load(model, files, drawn.map.tensors(keys))
    with jax.default_matmul_precision("highest"):
        if family == "T5":
            return np.asarray(_t5(model, batch["inputs"], batch["tokens"]))
        image = "image" in batch
        return np.asarray(_one(model, batch["image" if image else "tokens"]))


@nnx.jit
def _one(model: Any, x: Any) -> jax.Array:
    return model(x)


@nnx.jit
def _t5(model: Any, inputs: Any, tokens: Any) -> jax.Array:
    return model(inputs, tokens, np.ones(inputs.shape, bool))


def check_same(family: str, changes: dict[str, Any], folder: Path) -> str:
    """Compares logits; returns "same", or who refuses the settings.

    What transformers refuses we refuse, too. What we refuse alone names a key.
    """
    content = config_json(family, changes)
    want = their_logits(family, content, folder)
    if isinstance(want, Exception):
        # transformers' rotations fail for these with head_dim=null: they read None.
        nulls = ("Mixtral", "Olmo2", "Olmo3")
        fails = family in nulls and content.get("head_dim", 0) is None
        if not fails and not changes.keys() <= INERT:
            with pytest.raises(jshard.UserError):
                read(family, content)
        return "both"
    try:
        got = our_logits(family, content, folder)
    except jshard.UserError as error:
        named = any(key in str(error) for key in changes)
        assert named
        return "ours"
    assert np.std(want) > 1e-3
    assert np.max(np.abs(got - want)) <= 2e-5 * np.max(np.abs(want)), changes
    # What transformers writes of it is read as the same model.
    written = json.loads((folder / "config.json").read_text())
    assert read(family, written) == read(family, content)
    return "same"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
