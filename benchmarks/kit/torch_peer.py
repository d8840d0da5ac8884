"""A worker of stage peers: a job trained by PyTorch alone, with FSDP2.

    python -m kit.torch_peer '{"model": {...}, "batch_size": 8, ...}'

As torchtitan trains: ``fully_shard`` on each block and on the root, parameters and
gradients on the wire in dtypes of their own, compiled blocks and loss, cuDNN's or flash
attention, fused AdamW. What it prints and reads is in kit/turns.py; kit/peers.py has
the argument. It is one process of a job of several where RANK, WORLD_SIZE, MASTER_ADDR
and MASTER_PORT say so: each takes its part of the batch, and all are told the same.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
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

from kit.torch_models import Decoder, ViT, load
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
    if "RANK" in os.environ:
        dist.init_process_group()
    else:  # nothing has to be found over a network
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    # All attention is of the program's blocks: it is set once, outside of them.
    with sdpa_kernel(_ATTENTION, set_priority=True):
        start = time.perf_counter()
        run = make_run(job, device)
        seconds, losses = run(WARM_UP)
        # Blocks are compiled when they are called; the second half of the step compiles
        # the backward. What the later steps take is not part of it.
        compile_seconds = time.perf_counter() - start - sum(seconds[1:])
        answer(ready=seconds[-1], compile_seconds=compile_seconds, losses=losses)
        take_turns(answer, run, partial(peak_bytes, device))
    dist.destroy_process_group()


def make_run(
    job: dict[str, Any], device: torch.device
) -> Callable[[int], tuple[list[float], list[float]]]:
    """What takes so many steps, and gives the seconds and the loss of each."""
    is_vit = "patch_size" in job["model"]
    with device:
        model = (ViT if is_vit else Decoder)(job["model"])
    if job["initial"]:
        with np.load(job["initial"]) as values:
            load(model, values)
    shard(model, job, device)
    optimizer, schedule = make_optimizer(model, job["optimizer"])
    batch = random_batch(job["model"], job["batch_size"])
    inputs, targets = (
        torch.tensor(x, dtype=None if is_vit else torch.int64, device=device)
        .chunk(dist.get_world_size())[dist.get_rank()]
        .chunk(job["accumulate"])
        for x in (batch["image" if is_vit else "inputs"], batch["targets"])
    )
    micro_batches = list(zip(inputs, targets, strict=True))
    loss_fn = torch.compile(cross_entropy, backend=job["backend"])

    def step() -> torch.Tensor:
        total = torch.zeros((), device=device)
        for i, (inputs, targets) in enumerate(micro_batches):
            # Gradients of micro-batches add up in float32, and are reduced once.
            model.set_requires_gradient_sync(i == len(micro_batches) - 1)
            loss = loss_fn(model(inputs), targets) / len(micro_batches)
            loss.backward()
            total += loss.detach()
        if "clip_norm" in job["optimizer"]:
            nn.utils.clip_grad_norm_(model.parameters(), job["optimizer"]["clip_norm"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return total

    timed = timed_on_gpu if job["gpu"] else timed_on_cpu

    def run(steps: int) -> tuple[list[float], list[float]]:
        seconds, losses = timed(step, steps)
        mean = torch.stack(losses) / dist.get_world_size()
        if dist.get_world_size() > 1:
            dist.all_reduce(mean)
        return seconds, mean.tolist()

    return run


def shard(model: nn.Module, job: dict[str, Any], device: torch.device) -> None:
    """Remat, compilation and sharding of each block, and sharding of the rest."""
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, job["compute"]),
        reduce_dtype=getattr(torch, job["reduce"]),
        cast_forward_inputs=False,  # rotations stay in float32
    )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for i, block in enumerate(model.blocks):
        block = checkpointed(block, job["remat"])
        block.compile(backend=job["backend"], fullgraph=True)
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
    model: nn.Module, settings: dict[str, Any]
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """The recipes' AdamW and warm-up, in which all measured steps are."""

    def decays(name: str, param: nn.Parameter) -> bool:
        # Matrices and embeddings do: not biases and norms, nor a ViT's positions.
        return param.ndim > 1 and name not in ("class_token", "positions")

    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if decays(name, p)]},
        {
            "params": [p for name, p in named if not decays(name, p)],
            "weight_decay": 0.0,
        },
    ]
    optimizer = torch.optim.AdamW(
        groups,
        lr=settings["learning_rate"],
        betas=(0.9, settings.get("b2", 0.999)),
        weight_decay=settings["weight_decay"],
        fused=True,
    )
    warm_up = settings["warmup_steps"] + 1
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, 1)
    )
    return optimizer, schedule


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean, in float32; all tokens (B, T) or images (B, classes) count."""
    if logits.ndim == 3:
        logits, targets = logits.flatten(0, 1), targets.flatten()
    return F.cross_entropy(logits.float(), targets)


def timed_on_gpu(
    step: Callable[[], torch.Tensor], steps: int
) -> tuple[list[float], list[torch.Tensor]]:
    """The GPU's own times: Python runs ahead of it."""
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    losses = []
    ends[0].record()
    for end in ends[1:]:
        losses.append(step())
        end.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1000 for a, b in pairwise(ends)], losses


def timed_on_cpu(
    step: Callable[[], torch.Tensor], steps: int
) -> tuple[list[float], list[torch.Tensor]]:
    """Wall time."""
    seconds, losses = [], []
    for _ in range(steps):
        start = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - start)
    return seconds, losses


def peak_bytes(device: torch.device) -> int | None:
    """Of PyTorch's allocator."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else None


if __name__ == "__main__":
    main()
