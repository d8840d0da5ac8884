"""ResNet-50, or --config=benchmarks/resnet.py:resnext101: published runs to plan.

    python -m jshard.plan --config=benchmarks/resnet.py --topology=a100:1
    python -m jshard.plan --config=benchmarks/resnet.py:resnext101 --topology=a100:1

The images are noise. `--constants=benchmarks/a100_40gb.json` plans for the card of
40 GB, whose memory has 1.555 TB/s, as a share of the other's 2.039. docs/benchmarks.md
compares the plans with NVIDIA's figures.
"""

import optax
from flax import nnx
from ml_collections import ConfigDict

import jshard
from jshard.data.images.image_data import noise
from jshard.models.convolutions import (
    ConvNet,
    ConvNorm,
    ResidualBlock,
    make_shortcut,
)
from jshard.models.images import classification_loss, normalize
from jshard.models.resnet import ResNet, ResNetConfig

_CLASSES, _SIZE, _GROUPS = 1000, 224, 32
_DEPTHS = {"resnet50": (3, 4, 6, 3), "resnext101": (3, 4, 23, 3)}


class GroupedBlock(ResidualBlock):
    """A bottleneck of half the channels, in groups (Xie et al., arXiv:1611.05431)."""

    def __init__(self, config, size_in, size, stride, rngs):
        inner = size // 2
        self.conv1 = ConvNorm(config, size_in, inner, 1, rngs=rngs)
        self.conv2 = ConvNorm(
            config, inner, inner, 3, stride=stride, groups=_GROUPS, rngs=rngs
        )
        self.conv3 = ConvNorm(config, inner, size, 1, rngs=rngs)
        self.shortcut = make_shortcut(config, size_in, size, stride, rngs)

    def branch(self, x_BHWC):
        """Returns what is added to the stream."""
        return self.conv3(nnx.relu(self.conv2(nnx.relu(self.conv1(x_BHWC)))))


class ResNeXt(ConvNet):
    """Images, (B, H, W, C), to logits, (B, classes)."""

    def __init__(self, config, *, rngs):
        make = GroupedBlock
        super().__init__(config, make, kernel=7, stride=2, pool=True, rngs=rngs)


def get_config(name: str = "resnet50") -> ConfigDict:
    if name not in _DEPTHS:
        raise jshard.UserError(f"resnet.py:{name}: known are {', '.join(_DEPTHS)}")
    return ConfigDict(
        {
            "steps": 10,
            "batch_size": 256,
            "policy": {
                "remat": "none",
                "precision": {"compute": "bfloat16", "reduce": "float32"},
            },
            "model": {"depths": _DEPTHS[name], "grouped": name == "resnext101"},
        }
    )


def make_model(config, rngs):
    sizes = ResNetConfig(depths=tuple(config.model.depths), classes=_CLASSES)
    return (ResNeXt if config.model.grouped else ResNet)(sizes, rngs=rngs)


def make_optimizer(config):
    return optax.chain(optax.add_decayed_weights(5e-5), optax.sgd(0.1, momentum=0.9))


def loss_fn(model, batch):
    return classification_loss(model(normalize(batch["image"])), batch)


def make_data(config, split):
    images = noise(_SIZE, 3, _CLASSES, seed=0)
    return images.repeat() if split == "train" else images
