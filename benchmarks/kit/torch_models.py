"""The models of ``models/`` in PyTorch, for stage peers.

Shape suffixes: B batch, T time, D model width, N heads, K key-value heads, H head
width, F hidden width, V vocabulary, I half of H.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from kit.turns import IMAGES

Sizes = dict[str, Any]  # a recipe's config.model


class GPTAttention(nn.Module):
    """Causal self-attention."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        width = sizes["width"]
        self.num_heads = sizes["num_heads"]
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The attended values."""
        q, k, v = (
            x_BTD.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for x_BTD in self.qkv(x_BTD).chunk(3, dim=-1)
        )
        y_BNTH = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y_BNTH.transpose(1, 2).flatten(2))


class GPTBlock(nn.Module):
    """Attention and MLP, each on a normalised residual branch."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        width = sizes["width"]
        self.norm1 = nn.LayerNorm(width, eps=1e-5)
        self.attention = GPTAttention(sizes)
        self.norm2 = nn.LayerNorm(width, eps=1e-5)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The residual stream after this block."""
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        hidden = F.gelu(self.up(self.norm2(x_BTD)), approximate="tanh")
        return x_BTD + self.down(hidden)


class LlamaAttention(nn.Module):
    """Causal self-attention with rotary positions and grouped queries."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        width, heads = sizes["width"], sizes["num_heads"]
        self.head_width = width // heads
        kv_width = self.head_width * sizes["num_kv_heads"]
        self.grouped = sizes["num_kv_heads"] != heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_width, bias=False)
        self.v = nn.Linear(width, kv_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(
        self, x_BTD: torch.Tensor, cos_TI: torch.Tensor, sin_TI: torch.Tensor
    ) -> torch.Tensor:
        """The attended values."""

        def heads(x_BTE: torch.Tensor) -> torch.Tensor:
            return x_BTE.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

        y_BNTH = F.scaled_dot_product_attention(
            rotate(heads(self.q(x_BTD)), cos_TI, sin_TI),
            rotate(heads(self.k(x_BTD)), cos_TI, sin_TI),
            heads(self.v(x_BTD)),
            is_causal=True,
            enable_gqa=self.grouped,
        )
        return self.out(y_BNTH.transpose(1, 2).flatten(2))


class LlamaBlock(nn.Module):
    """Attention and gated MLP, each on a normalised residual branch."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        width, hidden = sizes["width"], sizes["hidden"]
        self.norm1 = nn.RMSNorm(width, eps=sizes["norm_eps"])
        self.attention = LlamaAttention(sizes)
        self.norm2 = nn.RMSNorm(width, eps=sizes["norm_eps"])
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(
        self, x_BTD: torch.Tensor, cos_TI: torch.Tensor, sin_TI: torch.Tensor
    ) -> torch.Tensor:
        """The residual stream after this block."""
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD), cos_TI, sin_TI)
        normed_BTD = self.norm2(x_BTD)
        return x_BTD + self.down(F.silu(self.gate(normed_BTD)) * self.up(normed_BTD))


class ViTAttention(nn.Module):
    """Self-attention of all patches."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.num_heads, width = sizes["num_heads"], sizes["width"]
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width) for _ in range(4)
        )

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The attended values."""
        q, k, v = (
            linear(x_BTD).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        y_BNTH = F.scaled_dot_product_attention(q, k, v)
        return self.out(y_BNTH.transpose(1, 2).flatten(2))


class ViTBlock(nn.Module):
    """Attention and MLP, each on a normalised residual branch."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        width = sizes["width"]
        self.norm1 = nn.LayerNorm(width, eps=1e-12)
        self.attention = ViTAttention(sizes)
        self.norm2 = nn.LayerNorm(width, eps=1e-12)
        self.up = nn.Linear(width, sizes["hidden_width"])
        self.down = nn.Linear(sizes["hidden_width"], width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The stream after this block."""
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        return x_BTD + self.down(F.gelu(self.up(self.norm2(x_BTD))))


class ViT(nn.Module):
    """Images, (B, H, W, C) in [0, 1], to logits; its values come from a file."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        width, patch = sizes["width"], sizes["patch_size"]
        self.patches = nn.Conv2d(IMAGES["channels"], width, patch, stride=patch)
        T = (IMAGES["image_size"] // patch) ** 2 + 1
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, T, width))
        self.blocks = nn.ModuleList(ViTBlock(sizes) for _ in range(sizes["num_layers"]))
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.classifier = nn.Linear(width, IMAGES["classes"])

    def forward(self, images_BHWC: torch.Tensor) -> torch.Tensor:
        """Logits, (B, classes)."""
        x_BDHW = self.patches((images_BHWC * 2 - 1).movedim(-1, 1))
        x_BTD = x_BDHW.flatten(2).transpose(1, 2)
        first_B1D = self.class_token.expand(len(x_BTD), -1, -1)
        x_BTD = torch.cat([first_B1D, x_BTD], dim=1) + self.positions
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.classifier(self.norm(x_BTD[:, 0]))


class Decoder(nn.Module):
    """Tokens to logits: a GPT, or a Llama where the sizes are those of one."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        width, vocab_size = sizes["width"], sizes["vocab_size"]
        self.sizes = sizes
        self.is_llama = "hidden" in sizes
        self.embed = nn.Embedding(vocab_size, width)
        if self.is_llama:
            make_block, self.norm = LlamaBlock, nn.RMSNorm(width, eps=sizes["norm_eps"])
            cos_TI, sin_TI = rotations(sizes)
            self.register_buffer("cos_TI", cos_TI, persistent=False)
            self.register_buffer("sin_TI", sin_TI, persistent=False)
        else:
            self.positions = nn.Embedding(sizes["sequence_length"], width)
            make_block, self.norm = GPTBlock, nn.LayerNorm(width, eps=1e-5)
        self.blocks = nn.ModuleList(
            make_block(sizes) for _ in range(sizes["num_layers"])
        )
        if not sizes["tied"]:
            self.head = nn.Linear(width, vocab_size, bias=False)
        initialize(self)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, V) in the dtype of the computation."""
        x_BTD = self.embed(tokens_BT)
        T = tokens_BT.shape[1]
        if self.is_llama:
            turned = (self.cos_TI[:T], self.sin_TI[:T])
        else:
            turned = ()
            x_BTD = x_BTD + self.positions(torch.arange(T, device=tokens_BT.device))
        for block in self.blocks:
            x_BTD = block(x_BTD, *turned)
        x_BTD = self.norm(x_BTD)
        if self.sizes["tied"]:
            return F.linear(x_BTD, self.embed.weight)
        return self.head(x_BTD)


@torch.no_grad()
def initialize(model: Decoder) -> None:
    """Deviations of 0.02; those that end a residual branch as in GPT-2, section 2.3."""
    residual_std = 0.02 / (2 * model.sizes["num_layers"]) ** 0.5
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            last = name.rpartition(".")[2] in ("out", "down")
            module.weight.normal_(std=residual_std if last else 0.02)
            if module.bias is not None:
                module.bias.zero_()
        if isinstance(module, nn.Embedding):
            module.weight.normal_(std=0.01 if name == "positions" else 0.02)


def load(model: nn.Module, values: Mapping[str, np.ndarray]) -> None:
    """Takes the values of the Flax model, by path; its kernels are transposed."""
    state = {}
    for path, value in values.items():
        module, _, last = path.rpartition(".")
        name = {"kernel": "weight", "embedding": "weight", "scale": "weight"}
        path = ".".join(filter(None, (module, name.get(last, last))))
        if path.startswith("blocks."):  # the first dimension is the layer's
            rest = path.removeprefix("blocks.")
            layers = {f"blocks.{i}.{rest}": layer for i, layer in enumerate(value)}
        else:
            layers = {path: value}
        state |= {
            path: torch.from_numpy(np.moveaxis(x, (-1, -2), (0, 1)))
            if last == "kernel"
            else torch.from_numpy(x)
            for path, x in layers.items()
        }
    model.load_state_dict(state)


def rotations(sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotary positions, (T, I) in float32."""
    width = sizes["width"] // sizes["num_heads"]
    frequencies_I = sizes["rope_theta"] ** -(torch.arange(0, width, 2) / width)
    positions_T = torch.arange(sizes["sequence_length"], dtype=torch.float32)
    angles_TI = positions_T[:, None] * frequencies_I
    return angles_TI.cos(), angles_TI.sin()


def rotate(
    x_BNTH: torch.Tensor, cos_TI: torch.Tensor, sin_TI: torch.Tensor
) -> torch.Tensor:
    """Turns the pairs of dimensions (i, i + H/2), in float32."""
    a_BNTI, b_BNTI = x_BNTH.float().chunk(2, dim=-1)
    turned = (a_BNTI * cos_TI - b_BNTI * sin_TI, b_BNTI * cos_TI + a_BNTI * sin_TI)
    return torch.cat(turned, dim=-1).to(x_BNTH.dtype)
