"""GPT-2 in plain PyTorch, the model that ``tilewise bench train`` trains: its attention is an argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Causal attention: a function of q, k and v, all (B, S, H, D) like its result.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Shape(NamedTuple):
    """How large a model is. The vocabulary may be padded: a multiple of 64 is faster to multiply."""

    layers: int
    heads: int
    width: int
    vocabulary: int


SMALL = Shape(layers=12, heads=12, width=768, vocabulary=50304)  # GPT-2's has 50,257 tokens


class Block(nn.Module):
    """x plus attention of the normalised x, plus an MLP of the normalised sum."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        x = x + self.attention_out(attention(q, k, v).flatten(-2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh"))


class GPT2(nn.Module):
    """Learned positions, pre-norm blocks, and a head that shares its weights with the embedding.

    The same seed gives the same weights, whatever was drawn before. They are larger than GPT-2's, with
    which attention is close to a mean of all values for many steps, so that any would train alike.
    """

    def __init__(self, shape: Shape, positions: int, device: torch.device, seed: int) -> None:
        super().__init__()
        with device:
            self.tokens = nn.Embedding(shape.vocabulary, shape.width)
            self.positions = nn.Embedding(positions, shape.width)
            self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
            self.norm = nn.LayerNorm(shape.width)
        generator = torch.Generator(device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, attention: Attention) -> Tensor:
        """The logits of the token after each, (B, S, vocabulary)."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = cast(Block, block)(x, attention)
        return F.linear(self.norm(x), self.tokens.weight)
