"""Stage peers: the same jobs by jshard, by GSPMD in plain JAX, and by PyTorch's FSDP2.

The systems share one GPU: each is a process with a third of the memory that is started,
compiled and warmed up once, and then trains in turns while the others wait. So all meet
the same clocks and temperatures, and a ratio is of turns that follow each other. Where
there are several GPUs, all three have the first.
"""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from jshard.recipe.load import find_recipe, open_recipe
from kit.jobs import Job, gpt2, llama
from kit.results import Recorder, Values
from kit.running import Part, last_words

# The answer to a line (None is the first, unasked), which is waited for so long.
Ask = Callable[[str | None, float], Values]

SYSTEMS = ("jshard", "gspmd", "torch")
ROUNDS = 5
TURN = 2.0  # seconds
READY_LIMIT, TURN_LIMIT = 120, 60  # seconds; what takes longer hangs
MEMORY_SHARE = 0.31  # of each; what CUDA needs for three processes is beside it


def parts(card: str | None) -> list[Part]:
    """A part for each job."""
    return [
        Part(
            job.name,
            partial(compare, job=job, gpu=card is not None),
            400,
            # With several, GSPMD's program might hang on CPUs (sharding/cpu/order.py).
            {"JAX_NUM_CPU_DEVICES": "1"},
        )
        for job in jobs(card)
    ]


def jobs(card: str | None) -> list[Job]:
    """GPT-2 as the recipe has it, and Llamas as deep as a third of the memory takes."""
    if card is None:
        chosen = [gpt2(None)]
    elif card in ("h200", "b200"):
        sizes: list[tuple[str, int | None]] = [("1b", None), ("7b", 6)]
        chosen = [_gpt2(card, 8), *_llamas(sizes)]
    else:
        chosen = [_gpt2(card, 16), *_llamas([("1b", 8), ("7b", 3)])]
    # All take the same batch again and again: that the loss falls alike shows that they
    # train alike, if the warm-up is over soon.
    return [
        replace(job, changes=job.changes | {"optimizer.warmup_steps": 10})
        for job in chosen
    ]


def _gpt2(card: str | None, micro: int) -> Job:
    changes = gpt2(card).changes | {"policy.accumulate": micro}
    return Job(f"gpt2-accumulate-{micro}", "gpt2_124m.py", changes)


def _llamas(sizes: list[tuple[str, int | None]]) -> list[Job]:
    return [
        llama(model, layers, 2, remat=remat)
        for model, layers in sizes
        for remat in ("full", "dots")
    ]


def compare(record: Recorder, *, job: Job, gpu: bool) -> None:
    """Trains a job with all systems in turns."""
    with open_recipe(find_recipe(job.recipe)) as recipe:
        config = job.config(recipe)
    tokens = config.batch_size * config.model.sequence_length
    with ExitStack() as stack:
        workers, found = start_all(stack, job, config, gpu)
        slowest = max((found[name].pop("ready") for name in workers), default=TURN)
        steps = max(2, round((TURN if gpu else 0.0) / slowest))
        turns = take_turns(workers, steps)
        for system, ask in workers.items():
            last = turns[system][-1]
            found[system] |= last if "error" in last else ask("end", TURN_LIMIT)
    speeds = {}
    for system, answers in turns.items():
        whole = [answer for answer in answers if "error" not in answer]
        speeds[system] = [tokens * steps / sum(turn["seconds"]) for turn in whole]
        if whole:
            found[system] |= _rates(speeds[system], whole)
    ratios = _ratios(speeds)
    record(job.name, tokens_a_step=tokens, steps_a_turn=steps, **found, ratios=ratios)
    if "error" in found["jshard"]:
        raise RuntimeError(f"jshard: {found['jshard']['error']}")


def start_all(
    stack: ExitStack, job: Job, config: Any, gpu: bool
) -> tuple[dict[str, Ask], dict[str, Values]]:
    """Starts the systems; gives those that are ready, and what each of all said.

    One after another: compilers choose kernels by their speed on the GPU.
    """
    workers: dict[str, Ask] = {}
    found: dict[str, Values] = {}
    for system in SYSTEMS:
        if system == "torch" and importlib.util.find_spec("torch") is None:
            found[system] = {"skipped": "torch is not installed"}
            continue
        words = jax_words(system, job) if system != "torch" else _torch(config, gpu)
        ask = stack.enter_context(started(words))
        found[system] = ask(None, READY_LIMIT)
        if "ready" in found[system]:
            workers[system] = ask
    return workers, found


def take_turns(
    workers: dict[str, Ask], steps: int, rounds: int = ROUNDS
) -> dict[str, list[Values]]:
    """What each answers, turn by turn; one that fails has no more turns."""
    turns: dict[str, list[Values]] = {system: [] for system in workers}
    for number in range(rounds):
        # Back and forth, so that none is always the first after a pause.
        order = list(workers)[:: -1 if number % 2 else 1]
        for system in order:
            if not (turns[system] and "error" in turns[system][-1]):
                answer = workers[system](f"run {steps}", TURN_LIMIT)
                turns[system].append(answer)
    return turns


@contextmanager
def started(words: list[str], **variables: str) -> Iterator[Ask]:
    """Starts a worker with these environment variables; gives what asks it.

    It ends with the block.
    """
    benchmarks = Path(__file__).resolve().parents[1]
    paths = [str(benchmarks.parent), str(benchmarks), os.environ.get("PYTHONPATH")]
    first_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": first_gpu,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": str(MEMORY_SHARE),
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # as torchtitan has it
        **variables,
    }
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            words, env=environment, stdin=pipe, stdout=pipe, stderr=errors
        ) as process,
    ):
        try:
            yield partial(_ask, process, errors)
        finally:
            process.kill()


def _ask(
    process: subprocess.Popen[bytes], errors: IO[str], line: str | None, seconds: float
) -> Values:
    """The answer to a line; an "error" where there is none within the time."""
    assert process.stdin is not None
    assert process.stdout is not None
    limit = threading.Timer(seconds, process.kill)
    limit.start()
    if line:
        with suppress(BrokenPipeError):  # it has ended, and its errors say why
            os.write(process.stdin.fileno(), f"{line}\n".encode())
    answer = process.stdout.readline()
    in_time = limit.is_alive()
    limit.cancel()
    if answer:
        return json.loads(answer)
    if not in_time:
        return {"error": f"no answer within {seconds} s"}
    code = process.wait()
    errors.seek(0)
    return {"error": last_words(code, errors.read())}


def jax_words(system: str, job: Job) -> list[str]:
    """The command of a worker with JAX."""
    return [sys.executable, "-m", "kit.jax_peer", system, json.dumps(asdict(job))]


def _torch(config: Any, gpu: bool) -> list[str]:
    """The command of that with PyTorch, as torchtitan trains."""
    return torch_words(
        config,
        gpu=gpu,
        memory_share=MEMORY_SHARE,
        # Inductor's C++ for a CPU takes longer to compile than a tiny job to train.
        backend="inductor" if gpu else "aot_eager",
        compute="bfloat16",
        reduce="float32",
        initial=None,
    )


def torch_words(config: Any, **settings: Any) -> list[str]:
    """The command of a worker with PyTorch.

    Args:
      config: a recipe's.
      settings: what the config does not say: ``gpu``, the ``memory_share`` of one;
        ``backend`` of torch.compile; dtypes ``compute`` and ``reduce``; ``initial``, a
        file of initial values by path in the Flax model, or None.
    """
    settings |= {
        "model": config.model.to_dict(),
        "batch_size": config.batch_size,
        "accumulate": config.policy.accumulate,
        "remat": config.policy.remat,
        "optimizer": config.optimizer.to_dict(),
    }
    return [sys.executable, "-m", "kit.torch_peer", json.dumps(settings)]


def _rates(speeds: list[float], turns: list[Values]) -> Values:
    """Of one system, over its turns."""
    median = statistics.median(speeds)
    return {
        "tokens_per_second": median,
        "spread": (max(speeds) - min(speeds)) / median,
        "step_seconds": [x for turn in turns for x in turn["seconds"]],
        "loss": turns[-1]["losses"][-1],
    }


def _ratios(speeds: dict[str, list[float]]) -> dict[str, float]:
    """The speed of jshard by that of each other: the median of their common rounds."""
    ratios = {}
    for system in speeds:
        # One that failed has fewer rounds.
        rounds = list(zip(speeds.get("jshard", []), speeds[system], strict=False))
        if rounds and system != "jshard":
            ratios[system] = statistics.median(ours / theirs for ours, theirs in rounds)
    return ratios
