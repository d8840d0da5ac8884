"""Handwritten digits: a small RegNet, or --config=digits.py:vit for a small ViT.

Trains on the 1797 images of 8 x 8 pixels that scikit-learn carries (Alpaydin & Kaynak
1998, archive.ics.uci.edu, "Optical Recognition of Handwritten Digits"); a fifth of them
is for validation.
"""

import functools
from typing import Any

import grain
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

import jshard
from jshard.data.images.image_data import mixup, smooth_labels
from jshard.models.images import classification_loss
from jshard.models.regnet import RegNet, RegNetConfig
from jshard.models.vit import ViT, ViTConfig
from jshard.recipe import Key
from jshard.recipe.schedule.spikes import skipping, spike_keys

CLASSES, SIZE = 10, 8
_VALIDATION = 360  # images


def get_config(model: str = "regnet") -> ConfigDict:
    if model not in _MODELS:
        raise jshard.UserError(
            f"--config=digits.py:{model}: known are {', '.join(_MODELS)}"
        )
    sizes, rate, steps = _MODELS[model]
    return ConfigDict(
        {
            "steps": steps,
            "batch_size": 64,
            "seed": 0,
            "log_every": 50,
            "eval_every": steps // 2,
            "checkpoint": {"every": steps // 2},
            "policy": {"ema_decay": 0.99},
            "model": sizes,
            "optimizer": {
                "learning_rate": rate,
                "warmup_steps": 40,
                "weight_decay": 0.05,
                **spike_keys(),
            },
            "data": {
                "shift": Key(
                    1,
                    "largest number of pixels by which images are shifted",
                    at_least=0,
                    at_most=3,
                ),
                **image_keys(label_smoothing=0.1),
            },
        }
    )


def image_keys(label_smoothing):
    """Returns the keys that all recipes of images have in their group data."""
    return {
        "label_smoothing": Key(
            label_smoothing,
            "share of each target that is spread over all classes",
            at_least=0,
            below=1,
        ),
        "mixup": Key(0.0, "alpha of mixup (arXiv:1710.09412); 0 is none", at_least=0),
    }


_REGNET = {
    "stem": Key(16, "channels of the first convolution", at_least=1),
    "depths": Key((1, 2), "blocks of each stage", noun="N,..."),
    "widths": Key((32, 64), "channels of each stage", noun="N,..."),
    "group_width": Key(16, "channels of a group of a convolution", at_least=1),
}
_VIT = {
    "patch_size": Key(2, "height and width of a patch", at_least=1),
    "num_layers": Key(3, "number of blocks", at_least=1),
    "num_heads": Key(4, "attention heads, which divide width", at_least=1),
    "width": Key(64, "width of the residual stream", at_least=1),
    "hidden_width": Key(128, "width of the MLPs", at_least=1),
    "dropout": Key(0.0, "dropout rate", at_least=0, below=1),
}
# Keys, peak of the learning rate and steps.
_MODELS = {"regnet": (_REGNET, 4e-3, 400), "vit": (_VIT, 2e-3, 1400)}


def make_model(config, rngs):
    sizes: Any = dict(config.model, channels=1, classes=CLASSES)
    if "patch_size" in sizes:
        # With the usual 0.02 it takes most of these few steps to tell positions apart.
        config = ViTConfig(image_size=SIZE, position_std=0.5, **sizes)
        return ViT(config, rngs=rngs)
    small = {"stem_stride": 1, "downsample_first": False}  # 8 x 8 pixels
    return RegNet(RegNetConfig(**sizes, **small), rngs=rngs)


def learning_rate(config):
    peak = config.optimizer.learning_rate
    warmup = min(config.optimizer.warmup_steps, config.steps // 2)
    return optax.warmup_cosine_decay_schedule(
        peak / (warmup + 1), peak, warmup, config.steps, end_value=peak / 100
    )


def make_optimizer(config):
    adamw = optax.adamw(
        learning_rate(config),
        weight_decay=config.optimizer.weight_decay,
        mask=decayed,
    )
    return skipping(adamw, config)


def decayed(params):
    """Applies weight decay to kernels, not to biases, norms and positions."""
    return nnx.map_state(lambda path, _: path[-1] == "kernel", params)


def loss_fn(model, batch):
    return classification_loss(model(batch["image"] * 2 - 1), batch)


def make_data(config, split):
    images, labels = _digits(split)
    shift = config.data.shift

    def example(index, rng=None):
        smoothing, pixels = 0.0, images[index]
        if rng is not None:
            smoothing = config.data.label_smoothing
            padded = np.pad(pixels, ((shift, shift), (shift, shift), (0, 0)))
            top, left = rng.integers(2 * shift + 1, size=2)
            pixels = padded[top : top + SIZE, left : left + SIZE]
        targets = smooth_labels(int(labels[index]), CLASSES, smoothing)
        return {"image": pixels, "targets": targets, "weights": np.float32(1)}

    numbers = grain.MapDataset.range(len(images))
    if split == "validation":
        return numbers.map(example)
    shuffled = numbers.seed(config.seed).shuffle().repeat()
    return mixup(shuffled.random_map(example), config.data.mixup, config.seed)


@functools.cache
def _digits(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the images of a split, in [0, 1], and their labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise jshard.UserError(
            f"the digits are in scikit-learn ({error}): pip install 'jshard[vision]'"
        ) from error
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    part = slice(_VALIDATION) if split == "validation" else slice(_VALIDATION, None)
    images = np.asarray(found.images[order[part]] / 16, np.float32)
    return images[..., None], found.target[order[part]]


def sample_images(config):
    images, labels = _digits("validation")
    images, labels = images[:40], labels[:40]

    def predict(model, batch):
        return model(batch["image"] * 2 - 1).argmax(-1)

    def caption(number, predicted):
        right = predicted == labels[number]
        return f"{predicted}" if right else f"{predicted}, not {labels[number]}"

    return predict, {"image": images}, caption
