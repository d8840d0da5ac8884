"""RegNetY-16GF on ImageNet as published.

100 epochs of SGD at a batch size of 512: Radosavovic et al. 2020, "Designing Network
Design Spaces" (arXiv:2003.13678), figure 21, and its baseline RegNetY-16GF_dds_8gpu in
github.com/facebookresearch/pycls (MODEL_ZOO.md: top-1 error 19.6 %). Computed in
bfloat16, with weights, sums of gradients and batch statistics in float32.

    python -m jshard.train --config=imagenet_regnet.py --config.data.path=FOLDER

FOLDER has train/CLASS/*.JPEG and val/CLASS/*.JPEG, a metadata.csv, or array records
(jshard/data/images/image_sources.py). Without it the images are noise, for plans and
timings.
"""

from pathlib import Path

import optax
from ml_collections import ConfigDict

from jshard.data.images.image_data import image_data, noise
from jshard.models import regnet_huggingface as huggingface  # noqa: F401  read by jshard
from jshard.models import regnet_timm as timm  # noqa: F401  likewise
from jshard.models.images import classification_loss, normalize
from jshard.models.regnet import RegNet, RegNetConfig
from jshard.recipe import Key
from jshard.recipe.schedule.spikes import skipping, spike_keys
from jshard.recipes.digits import image_keys

_IMAGES = 1_281_167
_BATCH = 512
_EPOCH = _IMAGES // _BATCH


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "steps": 100 * _EPOCH,
            "batch_size": _BATCH,
            "seed": 0,
            "log_every": 50,
            "eval_every": _EPOCH,
            "checkpoint": {"every": _EPOCH},
            "policy": {
                "remat": "none",
                "precision": {"compute": "bfloat16", "reduce": "float32"},
            },
            "model": {
                "channels": Key(3, "3 for colour, 1 for grey", at_least=1),
                "classes": Key(1000, "number of labels", at_least=2),
                "stem": Key(32, "channels of the first convolution", at_least=1),
                "stem_stride": Key(2, "stride of the first convolution", at_least=1),
                "depths": Key((2, 4, 11, 1), "blocks of each stage", noun="N,..."),
                "widths": Key(
                    (224, 448, 1232, 3024), "channels of each stage", noun="N,..."
                ),
                "group_width": Key(
                    112, "channels of a group of a convolution", at_least=1
                ),
                "squeeze_excite": Key(True, "squeeze and excitation (RegNetY)"),
                "downsample_first": Key(
                    True, "whether the first stage halves height and width"
                ),
            },
            "optimizer": {
                # 0.1 for each 128 images.
                "learning_rate": 0.1 * _BATCH / 128,
                "warmup_steps": 5 * _EPOCH,
                "momentum": 0.9,
                "weight_decay": 5e-5,
                **spike_keys(),
            },
            "data": {
                "path": Key(
                    "",
                    "folder of train/ and val/, with folders by class or metadata.csv, "
                    "or of array records; by default noise",
                    kind=Path,
                    bucket=True,
                ),
                "image_size": Key(224, "height and width of the crops", at_least=1),
                "color_shift": Key(
                    0.1,
                    "standard deviation of random shifts of the colours",
                    at_least=0,
                ),
                "max_broken": Key(
                    100, "largest number of images that may fail to decode", at_least=0
                ),
                **image_keys(label_smoothing=0.0),
            },
        }
    )


def make_model(config, rngs):
    return RegNet(RegNetConfig(**config.model), rngs=rngs)


def learning_rate(config):
    peak = config.optimizer.learning_rate
    warmup = min(config.optimizer.warmup_steps, config.steps // 2)
    return optax.warmup_cosine_decay_schedule(0.1 * peak, peak, warmup, config.steps)


def make_optimizer(config):
    options = config.optimizer
    sgd = optax.chain(
        # Of all parameters, as in the baseline; it is part of the gradient.
        optax.add_decayed_weights(options.weight_decay),
        optax.sgd(learning_rate(config), momentum=options.momentum, nesterov=True),
    )
    return skipping(sgd, config)


def loss_fn(model, batch):
    logits_BK = model(normalize(batch["image"]))
    return classification_loss(logits_BK, batch, top=(1, 5))


def make_data(config, split):
    model, data = config.model, config.data
    if not data.path:
        images = noise(data.image_size, model.channels, model.classes, config.seed)
        return images.repeat() if split == "train" else images
    return image_data(
        data.path,
        split,
        size=data.image_size,
        channels=model.channels,
        classes=model.classes,
        seed=config.seed,
        label_smoothing=data.label_smoothing,
        mixup_alpha=data.mixup,
        color_shift=data.color_shift if split == "train" else 0.0,
        most_broken=data.max_broken,
    )
