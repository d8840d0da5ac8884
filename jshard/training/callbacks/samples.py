"""What the model writes, and what it says of pictures, for the user and the report."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jshard.cli.formatting import printable
from jshard.fsdp.fsdp import FSDP
from jshard.fsdp.state import TrainState
from jshard.run.metrics import RunFolder
from jshard.run.progress import ProgressDisplay
from jshard.training.prepared_run import PreparedRun
from jshard.training.recipe_functions import RecipeFunctions


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
    generate: Callable,
    prompts: Any,
    decode: Callable,
    fsdp: FSDP,
    abstract_state: TrainState,
) -> Callable[[TrainState], str]:
    """Makes a recipe's sampling, and traces it without computing anything.

    `generate`, `prompts` and `decode` are what the recipe's `sample` returns.

    Returns:
      A function from a state to the text generated for the first prompt.
    """
    local_devices = fsdp.mesh.size // jax.process_count()

    def fill_devices(rows: np.ndarray) -> np.ndarray:
        count = -(-len(rows) // local_devices) * local_devices
        return np.resize(rows, (count, *rows.shape[1:]))  # repeats rows

    predict_step = fsdp.predict_step(generate)
    batch = fsdp.shard_examples(jax.tree.map(fill_devices, prompts))
    jax.eval_shape(predict_step, abstract_state, batch)

    def sample(state: TrainState) -> str:
        tokens = predict_step(state, batch)
        text = decode(np.asarray(tokens.addressable_shards[0].data)[0])
        # A barely trained model may generate control sequences of the terminal.
        return printable(text)

    return sample
