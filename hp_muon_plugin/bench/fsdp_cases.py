"""Models of ``hp-muon bench fsdp``: small stacks of transformer layers in plain torch."""

import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from hp_muon_plugin.errors import ConfigError

_PATTERN = re.compile(r"(\d+)x(\d+)(?:e(\d+))?(\+bf16)?")
_HEAD = 64
_VOCABULARY = 2048
_SEED = 5


@dataclass(frozen=True, slots=True)
class Case:
    """One model.

    Attributes:
        hidden: Width.
        layers: Layers; each is a unit.
        experts: Experts of each layer, as two stacked matrices; 0 for one dense MLP of four times the width.
        is_bf16: Whether it computes in bfloat16, with weights and reductions in float32.
    """

    hidden: int
    layers: int
    experts: int = 0
    is_bf16: bool = False

    def __str__(self) -> str:
        experts, precision = f"e{self.experts}" if self.experts else "", "+bf16" if self.is_bf16 else ""
        return f"{self.hidden}x{self.layers}{experts}{precision}"


NAMED = {
    "dense": Case(512, 6),
    "wide": Case(1024, 2),
    "many": Case(128, 24),
    "moe": Case(256, 4, experts=16),
    "dense-bf16": Case(512, 6, is_bf16=True),
}


def parse_case(text: str, option: str) -> Case:
    """Read a case.

    Args:
        text: A name, or such as ``512x6``, ``256x4e16`` or ``512x6+bf16``.
        option: Where it was given, for messages.

    Returns:
        The case.

    Raises:
        ConfigError: If it is none.
    """
    if text in NAMED:
        return NAMED[text]
    found = _PATTERN.fullmatch(text)
    hidden, layers, experts = (int(size or 0) for size in found.groups()[:3]) if found else (0, 0, 0)
    if not found or 0 in (hidden, layers) or found[3] == "0":
        known = ", ".join(NAMED)
        raise ConfigError(option, text, "is no case", f"write one of {known}, or width x layers, as 512x6 or 256x4e16")
    return Case(hidden, layers, experts, is_bf16=bool(found[4]))


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = max(1, hidden // _HEAD)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend.

        Args:
            x: ``(batch, tokens, hidden)``.

        Returns:
            The same shape.
        """
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Stacked experts; each takes an equal run of the tokens, so that no router decides how much work there is."""

    def __init__(self, hidden: int, count: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(count, hidden, 2 * hidden) / hidden**0.5)
        self.second = nn.Parameter(torch.randn(count, 2 * hidden, hidden) / (2 * hidden) ** 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply each expert to its tokens.

        Args:
            x: ``(batch, tokens, hidden)``; as many tokens in all as a multiple of the experts.

        Returns:
            The same shape.
        """
        routed = x.reshape(self.first.shape[0], -1, x.shape[-1])
        return torch.bmm(F.gelu(torch.bmm(routed, self.first)), self.second).view(x.shape)


class Layer(nn.Module):
    """Attention, and an MLP or experts."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(case.hidden), nn.LayerNorm(case.hidden)
        self.attention = Attention(case.hidden)
        self.mlp: nn.Module
        if case.experts:
            self.mlp = Experts(case.hidden, case.experts)
        else:
            wide = nn.Linear(case.hidden, 4 * case.hidden)
            self.mlp = nn.Sequential(wide, nn.GELU(), nn.Linear(4 * case.hidden, case.hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer.

        Args:
            x: ``(batch, tokens, hidden)``.

        Returns:
            The same shape.
        """
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Stack(nn.Module):
    """Embedding, layers, norm, head."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, case.hidden)
        self.layers = nn.ModuleList([Layer(case) for _ in range(case.layers)])
        self.norm = nn.LayerNorm(case.hidden)
        self.head = nn.Linear(case.hidden, _VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of the next token.

        Args:
            tokens: ``(batch, tokens)`` int64.

        Returns:
            A float32 scalar.
        """
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def build(case: Case) -> Stack:
    """The model, with the same weights on every rank.

    Args:
        case: Which.

    Returns:
        In float32.
    """
    torch.manual_seed(_SEED)
    return Stack(case)


def batch(rank: int, step: int, num_tokens: int) -> torch.Tensor:
    """What a rank trains on in a step.

    Args:
        rank: Global rank.
        step: Counted from 0.
        num_tokens: Tokens.

    Returns:
        ``(1, num_tokens)`` int64.
    """
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, _VOCABULARY, (1, num_tokens), generator=generator)


def least_flops(case: Case, num_tokens: int) -> float:
    """Operations of the matrix products of one forward and backward pass.

    Args:
        case: Which.
        num_tokens: Tokens of this rank.

    Returns:
        Operations, without attention scores.
    """
    mlp = 4 * case.hidden if case.experts else 8 * case.hidden
    used = case.layers * case.hidden * (4 * case.hidden + mlp) + case.hidden * _VOCABULARY
    return 6.0 * used * num_tokens
