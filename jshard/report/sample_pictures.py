"""Pictures with what the trained model says of them, for the report."""

import base64
import io
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jshard.errors import UserError
from jshard.fsdp.fsdp import FSDP
from jshard.fsdp.state import TrainState

_WIDEST = 96  # pixels in the report


def prepare_pictures(
    predict: Callable,
    batch: Any,
    caption: Callable,
    fsdp: FSDP,
    abstract_state: TrainState,
) -> Callable[[TrainState], list[dict[str, str]]]:
    """Makes a recipe's predictions on pictures, and traces them without computing.

    `predict`, `batch` and `caption` are what the recipe's `sample_images` returns.

    Returns:
      A function from a state to the pictures for the report: a PNG in base64, and the
      caption. Every process calls it.

    Raises:
      UserError: the images are not of shape (images, height, width, 1 or 3).
    """
    images = np.asarray(batch["image"])
    if images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise UserError(
            "sample_images(config): batch['image'] has the shape "
            f"{list(images.shape)}; it must be [images, height, width, 1 or 3]"
        )
    local_devices = fsdp.mesh.size // jax.process_count()
    count = -(-len(images) // local_devices) * local_devices
    predict_step = fsdp.predict_step(predict)
    rows = jax.tree.map(lambda x: np.resize(x, (count, *x.shape[1:])), batch)
    sharded = fsdp.shard_examples(rows)
    jax.eval_shape(predict_step, abstract_state, sharded)
    encoded = [_png(image) for image in images]

    def pictures(state: TrainState) -> list[dict[str, str]]:
        found = fsdp.fetch(predict_step(state, sharded))
        return [
            {
                "png": png,
                "caption": caption(i, jax.tree.map(lambda x, i=i: x[i], found)),
            }
            for i, png in enumerate(encoded)
        ]

    return pictures


def _png(image: np.ndarray) -> str:
    """Encodes an image, floating in [0, 1] or uint8, no wider than in the report."""
    from jshard.data.images.image_files import pillow

    if image.dtype != np.uint8:
        image = np.rint(np.clip(image, 0, 1) * 255).astype(np.uint8)
    picture = pillow().fromarray(image[..., 0] if image.shape[-1] == 1 else image)
    picture.thumbnail((_WIDEST, _WIDEST))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
