"""Training in PyTorch, of language models of transformers."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

Batch = Mapping[str, np.ndarray]


def torch_losses(
    model: Any, batch: Callable[[int], Batch], steps: int, rate: float
) -> list[float]:
    """The loss of each step of AdamW; `batch(step)` has inputs and targets."""
    torch = pytest.importorskip("torch")

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    losses = []
    for step in range(steps):
        inputs, targets = (torch.tensor(batch(step)[k]) for k in ("inputs", "targets"))
        logits = model(inputs).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
