"""A GPT trained on two CPU devices by jshard, GSPMD and PyTorch's FSDP2, in turns.

    python benchmarks/cpu_peers.py

Needs PyTorch beside jshard. All train the same GPT of 19 million parameters in float32
from the same initial values on the same batch: jshard and GSPMD in one process with two
virtual devices, FSDP2 in two processes of one thread each, which gloo joins. Each is
compiled and warmed up once, then they take turns. GSPMD's collectives have no enforced
order on CPUs: where it hangs, its row says so.
"""

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
from flax import nnx

from jshard.recipe.load import find_recipe, open_recipe
from kit.jobs import Job
from kit.peers import Ask, jax_words, started, take_turns, torch_words
from kit.results import Values

LIMIT = 300  # seconds, to compile and warm up
DEVICES = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
NAMES = {"jshard": "jshard", "gspmd": "GSPMD, plain JAX", "torch": "PyTorch FSDP2"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--length", type=int, default=256, help="tokens a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--remat", default="none", choices=("none", "dots", "full"))
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="of a turn")
    options = parser.parse_args()
    changes = {
        "model.num_layers": options.layers,
        "model.num_heads": 8,
        "model.width": options.width,
        "model.sequence_length": options.length,
        "batch_size": options.batch,
        "policy.remat": options.remat,
        "optimizer.learning_rate": 1e-3,
    }
    job = Job("cpu", "gpt.py", changes)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        workers = start_all(stack, job, Path(folder) / "initial.npz", options.backend)
        ready: dict[str, Values] = {}
        for name, ask in workers.items():
            ready[name] = ask(None, LIMIT)
            print(name, json.dumps(ready[name]), flush=True)
        going = {name: ask for name, ask in workers.items() if "ready" in ready[name]}
        if "jshard" not in going:
            sys.exit(ready["jshard"]["error"])
        turns = take_turns(going, options.steps, options.rounds)
    print(f"jax {jax.__version__}, {time.strftime('%Y-%m-%d')}, {json.dumps(changes)}")
    print(table({name: [ready[name], *turns.get(name, [])] for name in workers}))


def start_all(
    stack: ExitStack, job: Job, initial: Path, backend: str
) -> dict[str, Ask]:
    """Starts the systems, from initial values that go through the file."""
    with open_recipe(find_recipe(job.recipe)) as recipe:
        config = job.config(recipe)
        params = nnx.state(recipe.make_model(config, nnx.Rngs(config.seed)), nnx.Param)
    values = {
        ".".join(map(str, path)): np.asarray(variable.get_value())
        for path, variable in nnx.to_flat_state(params)
    }
    np.savez(initial, **values)  # pyright: ignore[reportArgumentType]
    count = sum(value.size for value in values.values())
    print(f"{count / 1e6:.1f} million parameters", flush=True)

    def start(words: list[str], variables: dict[str, str]) -> Ask:
        return stack.enter_context(started(words, **variables))

    workers = {x: start(jax_words(x, job), DEVICES) for x in ("jshard", "gspmd")}
    words = torch_words(
        config, gpu=False, memory_share=None, backend=backend, compute="float32",
        reduce="float32", initial=str(initial),
    )  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [start(words, ONE_THREAD | group | {"RANK": str(i)}) for i in range(2)]
    return workers | {"torch": together(ranks)}


def together(ranks: list[Ask]) -> Ask:
    """Asks all processes of a job at once; process 0 answers, or one that failed."""

    def ask(line: str | None, seconds: float) -> Values:
        with ThreadPoolExecutor(len(ranks)) as pool:
            answers = list(pool.map(lambda rank: rank(line, seconds), ranks))
        return next((x for x in answers if "error" in x), answers[0])

    return ask


def table(answers: dict[str, list[Values]]) -> str:
    """Of each system's answers: the warm-up's, then those of its turns."""
    lines = ["| | s a step | least to most | x jshard | losses |", "|---" * 5 + "|"]
    ours = means(answers["jshard"])
    for system, found in answers.items():
        cells = [NAMES[system]]
        cells[0] += "".join(
            f" (failed: {x['error'].splitlines()[-1]})" for x in found if "error" in x
        )
        if seconds := [x for turn in found for x in turn.get("seconds", [])]:
            # Of turns that follow each other.
            ratios = [x / y for x, y in zip(means(found), ours, strict=False)]
            losses = [loss for turn in found for loss in turn.get("losses", [])]
            cells += [
                f"{statistics.median(seconds):.2f}",
                f"{min(seconds):.2f} to {max(seconds):.2f}",
                f"{statistics.median(ratios):.2f}" if ratios else "",
                " ".join(f"{loss:.4f}" for loss in losses[:5]),
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def means(answers: list[Values]) -> list[float]:
    """Seconds a step of each turn."""
    return [statistics.mean(turn["seconds"]) for turn in answers if "seconds" in turn]


if __name__ == "__main__":
    main()
