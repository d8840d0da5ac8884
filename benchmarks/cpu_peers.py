"""A GPT or a ViT trained on CPU devices by jshard, GSPMD and PyTorch's FSDP2, in turns.

    python benchmarks/cpu_peers.py

Needs PyTorch beside jshard. All train the same model in float32 from the same initial
values on the same batch: jshard and GSPMD in a process each, with virtual devices,
FSDP2 in as many processes, which gloo joins and which share the cores. Each is compiled
and warmed up once, then they take turns. GSPMD's collectives have no enforced order on
CPUs: where it hangs, its row says so. Its step is for language models alone.

Memory is the most of a turn, of all processes of a system, without the files that they
map. Linux only.
"""

import argparse
import json
import os
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
# Recipe and its changes: 20.1 million parameters and 2,048 tokens a step; 10.7 million
# and 4,160 patches.
MODELS: dict[str, tuple[str, Values]] = {
    "gpt": (
        "gpt.py",
        {
            "model.num_layers": 6,
            "model.num_heads": 8,
            "model.width": 512,
            "model.sequence_length": 256,
            "batch_size": 8,
            "optimizer.learning_rate": 1e-3,
        },
    ),
    "vit": (
        "digits.py:vit",
        {
            "model.patch_size": 1,
            "model.num_layers": 6,
            "model.num_heads": 6,
            "model.width": 384,
            "model.hidden_width": 1536,
            "batch_size": 64,
            "policy.ema_decay": None,
        },
    ),
}
NAMES = {"jshard": "jshard", "gspmd": "GSPMD, plain JAX", "torch": "PyTorch FSDP2"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt", choices=MODELS)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--remat", default="none", choices=("none", "dots", "full"))
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="of a turn")
    options = parser.parse_args()
    recipe, changes = MODELS[options.model]
    job = Job("cpu", recipe, changes | {"policy.remat": options.remat})
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        initial = Path(folder) / "initial.npz"
        workers = start_all(stack, job, initial, options.backend, options.devices)
        ready: dict[str, Values] = {}
        for name, ask in workers.items():
            ready[name] = ask(None, LIMIT)
            print(name, json.dumps(ready[name]), flush=True)
        going = {name: ask for name, ask in workers.items() if "ready" in ready[name]}
        if "jshard" not in going:
            sys.exit(ready["jshard"]["error"])
        turns = take_turns(going, options.steps, options.rounds)
        ends = {name: ask("end", LIMIT) for name, ask in going.items()}
    print(f"jax {jax.__version__}, {time.strftime('%Y-%m-%d')}, {vars(options)}")
    answers = {name: [ready[name], *turns.get(name, [])] for name in workers}
    print(table(answers, {name: end.get("host_bytes") for name, end in ends.items()}))


def start_all(
    stack: ExitStack, job: Job, initial: Path, backend: str, devices: int
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

    virtual = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    systems = ("jshard", "gspmd") if job.recipe == "gpt.py" else ("jshard",)
    workers = {system: start(jax_words(system, job), virtual) for system in systems}
    words = torch_words(
        config, gpu=False, memory_share=None, backend=backend, compute="float32",
        reduce="float32", initial=str(initial),
    )  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    threads = str(max(1, (os.cpu_count() or 1) // devices))
    group = {"WORLD_SIZE": str(devices), "MASTER_ADDR": "127.0.0.1"}
    group |= {"MASTER_PORT": port, "OMP_NUM_THREADS": threads}
    ranks = [start(words, group | {"RANK": str(i)}) for i in range(devices)]
    return workers | {"torch": together(ranks)}


def together(ranks: list[Ask]) -> Ask:
    """Asks all processes of a job at once; process 0 answers, or one that failed.

    The memory is that of all.
    """

    def ask(line: str | None, seconds: float) -> Values:
        with ThreadPoolExecutor(len(ranks)) as pool:
            answers = list(pool.map(lambda rank: rank(line, seconds), ranks))
        answer = next((x for x in answers if "error" in x), answers[0])
        if "host_bytes" in answer:
            return answer | {"host_bytes": sum(x["host_bytes"] for x in answers)}
        return answer

    return ask


def table(answers: dict[str, list[Values]], memory: dict[str, int | None]) -> str:
    """Of each system's answers: the warm-up's, then those of its turns; and bytes."""
    lines = [
        "| | s a step | least to most | x jshard | MiB | losses |",
        "|---" * 6 + "|",
    ]
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
                f"{size / 2**20:,.0f}" if (size := memory.get(system)) else "",
                " ".join(f"{loss:.4f}" for loss in losses[:5]),
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def means(answers: list[Values]) -> list[float]:
    """Seconds a step of each turn."""
    return [statistics.mean(turn["seconds"]) for turn in answers if "seconds" in turn]


if __name__ == "__main__":
    main()
