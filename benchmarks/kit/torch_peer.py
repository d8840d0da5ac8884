"""A worker of stage peers: a job trained by PyTorch alone, with FSDP2.

    python -m kit.torch_peer '{"model": {...}, "batch_size": 8, ...}'

As torchtitan trains: ``fully_shard`` on each block and on the root, bfloat16 parameters
and float32 gradients on the wire, compiled blocks and loss, cuDNN's or flash attention,
fused AdamW. What it prints and reads is in kit/turns.py; kit/peers.py has the argument.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from kit.torch_models import Decoder
from kit.turns import WARM_UP, open_answers, random_batch, take_turns

_OPS = torch.ops.aten
# What remat "dots" keeps: matrix products, and attention.
_KEPT = [
    _OPS.mm.default,
    _OPS.addmm.default,
    _OPS._scaled_dot_product_cudnn_attention.default,
    _OPS._scaled_dot_product_flash_attention.default,
    _OPS._scaled_dot_product_efficient_attention.default,
    _OPS._scaled_dot_product_flash_attention_for_cpu.default,
]
# The first that can take the arguments is taken.
_ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


def main() -> None:
    """Trains as it is told."""
    answer = open_answers()
    job = json.loads(sys.argv[1])
    device = torch.device("cuda" if job["gpu"] else "cpu")
    if job["gpu"]:
        torch.cuda.set_per_process_memory_fraction(job["memory_share"])
    # One process: nothing has to be found over a network.
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    # All attention is of the program's blocks: it is set once, outside of them.
    with sdpa_kernel(_ATTENTION, set_priority=True):
        start = time.perf_counter()
        run = make_run(job, device)
        seconds, loss = run(WARM_UP)
        # Blocks are compiled when they are called; the second half of the step compiles
        # the backward. What the later steps take is not part of it.
        compile_seconds = time.perf_counter() - start - sum(seconds[1:])
        answer(ready=seconds[-1], compile_seconds=compile_seconds, loss=loss)
        take_turns(answer, run, partial(peak_bytes, device))
    dist.destroy_process_group()


def make_run(
    job: dict[str, Any], device: torch.device
) -> Callable[[int], tuple[list[float], float]]:
    """What takes so many steps, and gives the seconds of each and the last loss."""
    # Inductor's C++ for a CPU takes longer to compile than a tiny job to train.
    backend = "inductor" if job["gpu"] else "aot_eager"
    with device:
        model = Decoder(job["model"])
    shard(model, job["remat"], backend, device)
    optimizer, schedule = make_optimizer(model, job["optimizer"], fused=job["gpu"])
    batch = random_batch(
        job["model"]["vocab_size"], job["batch_size"], job["model"]["sequence_length"]
    )
    tokens, targets = (
        torch.tensor(batch[name], dtype=torch.int64, device=device).chunk(
            job["accumulate"]
        )
        for name in ("inputs", "targets")
    )
    micro_batches = list(zip(tokens, targets, strict=True))
    loss_fn = torch.compile(cross_entropy, backend=backend)

    def step() -> torch.Tensor:
        total = torch.zeros((), device=device)
        for i, (tokens_BT, targets_BT) in enumerate(micro_batches):
            # Gradients of micro-batches add up in float32, and are reduced once.
            model.set_requires_gradient_sync(i == len(micro_batches) - 1)
            loss = loss_fn(model(tokens_BT), targets_BT) / len(micro_batches)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), job["optimizer"]["clip_norm"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return total

    return partial(timed_on_gpu if job["gpu"] else timed_on_cpu, step)


def shard(model: Decoder, remat: str, backend: str, device: torch.device) -> None:
    """Remat, compilation and sharding of each block, and sharding of the rest."""
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # rotations stay in float32
    )
    mesh = init_device_mesh(device.type, (1,))
    for i, block in enumerate(model.blocks):
        block = checkpointed(block, remat)
        block.compile(backend=backend, fullgraph=True)
        model.blocks[i] = fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)


def checkpointed(block: nn.Module, remat: str) -> nn.Module:
    """The block with activation checkpointing."""
    keep = partial(create_selective_checkpoint_contexts, _KEPT)
    options = {"full": {}, "dots": {"context_fn": keep}}
    if remat == "none":
        return block
    return checkpoint_wrapper(block, preserve_rng_state=False, **options[remat])


def make_optimizer(
    model: nn.Module, settings: dict[str, Any], *, fused: bool
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW and its warm-up, in which all measured steps are; train/gpt.py has both."""
    groups = [
        # Weight decay is for matrices and embeddings: not for biases and norms.
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups,
        lr=settings["learning_rate"],
        betas=(0.9, settings["b2"]),
        weight_decay=settings["weight_decay"],
        fused=fused,
    )
    warm_up = settings["warmup_steps"] + 1
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, 1)
    )
    return optimizer, schedule


def cross_entropy(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """The mean, in float32; all tokens count."""
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


def timed_on_gpu(
    step: Callable[[], torch.Tensor], steps: int
) -> tuple[list[float], float]:
    """The GPU's own times: Python runs ahead of it."""
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    ends[0].record()
    for end in ends[1:]:
        loss = step()
        end.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1000 for a, b in pairwise(ends)], loss.item()


def timed_on_cpu(
    step: Callable[[], torch.Tensor], steps: int
) -> tuple[list[float], float]:
    """Wall time."""
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        loss = step()
        seconds.append(time.perf_counter() - start)
    return seconds, loss.item()


def peak_bytes(device: torch.device) -> int | None:
    """Of PyTorch's allocator."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else None


if __name__ == "__main__":
    main()
