"""Plans the pretraining of Llama 3 70B before any GPU is rented.

    .plan/bin/python examples/plan_70b.py --gpus=64,128,256,512

Compiles the step that training would run on each number of H100s, and prints whether it
fits, how fast the model of docs/plan.md expects it to be, and what that means for a
training of so many tokens, in days and GPU-hours. Nothing runs on a GPU, and no GPU has
confirmed these times. It needs an environment with jshard[plan], and minutes for each
(2>/dev/null hides what JAX says about the GPUs that are not there).
"""

import argparse
import os

os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported: there is no GPU

from jshard.plan.planning import plan_recipe
from jshard.recipe import complete, configure, find_recipe, open_recipe
from jshard.system.formatting import format_bytes


def plan(gpus, batch_size, overrides):
    with open_recipe(find_recipe("llama.py:3-70b")) as recipe:
        config = complete(recipe.get_config(), "llama.py:3-70b")
        config.batch_size = batch_size
        config.update_from_flattened_dict(overrides)
        return plan_recipe(configure(recipe, config), f"h100:{gpus}")


def main(gpus, batch_size, tokens, overrides):
    print(f"Llama 3 70B, {batch_size} sequences a step, {tokens:.3g} tokens")
    print("GPUs     memory  fits       step, s  tokens/s/GPU    MFU  days  GPU-hours")
    for number in gpus:
        planned = plan(number, batch_size, overrides)
        low, high = planned.seconds_range
        speed = planned.items_per_second
        hours = tokens / speed / 3600
        print(
            f"{number:4}{format_bytes(planned.memory.total):>11}"
            f"{'yes' if planned.fits else 'no':>6}{low:8.1f} to {high:4.1f}"
            f"{speed / number:12.0f}{planned.mfu:9.1%}{hours / 24:6.0f}"
            f"{hours * number:11,.0f}"
        )
        if planned.chosen:
            print(f"      {planned.chosen}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    number_list = lambda text: [int(number) for number in text.split(",")]
    parser.add_argument("--gpus", type=number_list, default=[64, 128, 256, 512])
    parser.add_argument("--batch_size", type=int, default=512, help="sequences of 8192")
    parser.add_argument("--tokens", type=float, default=1e12, help="of the training")
    parser.add_argument("--layers", type=int, default=80, help="fewer, to try it")
    options = parser.parse_args()
    overrides = {"model.num_layers": options.layers}
    main(options.gpus, options.batch_size, options.tokens, overrides)
