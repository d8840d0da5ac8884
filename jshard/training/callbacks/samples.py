"""What the model writes, and what it says of pictures, for the user and the report."""

import base64
import dataclasses
import io
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jshard.sharding.settings.state import TrainState
from jshard.system.errors import UserError
from jshard.system.formatting import printable
from jshard.training.prepared_run import PreparedRun
from jshard.training.recipe_functions import RecipeFunctions
from jshard.training.run.metrics import RunFolder
from jshard.training.run.progress import ProgressDisplay

_WIDEST = 96  # pixels in the report


@dataclasses.dataclass
class Samples:
    """Samples after each evaluation and at the end; shows pictures at the end."""

    run: PreparedRun
    recipe: RecipeFunctions
    folder: RunFolder
    display: ProgressDisplay
    _newest: tuple[int, str] = dataclasses.field(default=(-1, ""), init=False)

    def after_evaluation(self, step: int, loss: float | None) -> None:
        """Samples a text; `loss` is that of the evaluation, if there was one."""
        if self.recipe.sample is not None:
            self.run.peers.at("sampling", step)
            text = self.recipe.sample(self.run.state)
            self.folder.sample(step, text, loss)
            self._newest = step, text

    def at_end(self, step: int) -> None:
        """Shows the text of the last step, and adds pictures to the report."""
        if self.recipe.sample is not None:
            if self._newest[0] != step:
                self.after_evaluation(step, None)
            self.display.say(f"\nsample:\n{self._newest[1]}\n")
        if self.recipe.pictures is not None:
            self.run.peers.at("predicting", step)
            self.folder.note(pictures=self.recipe.pictures(self.run.state))


def prepare_sample(
    run: PreparedRun, generate: Callable, prompts: Any, decode: Callable
) -> Callable[[TrainState], str]:
    """Makes a recipe's sampling, and traces it without computing anything.

    `generate`, `prompts` and `decode` are what the recipe's `sample` returns.

    Returns:
      A function from a state to the text generated for the first prompt.
    """
    step = _prepare(run, generate, prompts)

    def sample(state: TrainState) -> str:
        text = decode(np.asarray(step(state).addressable_shards[0].data)[0])
        # A barely trained model may generate control sequences of the terminal.
        return printable(text)

    return sample


def prepare_pictures(
    run: PreparedRun, predict: Callable, batch: Any, caption: Callable
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
    step, encoded = _prepare(run, predict, batch), [_png(image) for image in images]

    def pictures(state: TrainState) -> list[dict[str, str]]:
        found = run.job.fsdp.fetch(step(state))
        rows = [jax.tree.map(lambda x, i=i: x[i], found) for i in range(len(encoded))]
        return [
            {"png": png, "caption": caption(i, row)}
            for i, (png, row) in enumerate(zip(encoded, rows, strict=True))
        ]

    return pictures


def _prepare(run: PreparedRun, function: Callable, batch: Any) -> Callable:
    """Traces a function of a model and a batch, which each process gives all devices.

    Returns a function from a state to what it returns; rows repeat on the devices.
    """
    fsdp = run.job.fsdp
    local_devices = fsdp.mesh.size // jax.process_count()

    def fill_devices(rows: np.ndarray) -> np.ndarray:
        count = -(-len(rows) // local_devices) * local_devices
        return np.resize(rows, (count, *rows.shape[1:]))

    step = fsdp.predict_step(function)
    sharded = fsdp.shard_examples(jax.tree.map(fill_devices, batch))
    step.eval_shape(run.abstract_state, sharded)
    return lambda state: step(state, sharded)


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
