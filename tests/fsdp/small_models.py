"""Models whose shapes make sharding hard, and the same training in one process in float64."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH = 11, 6


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, 3 * width + 1)
        self.second = nn.Linear(3 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(self.norm(x))))


class Experts(nn.Module):
    """A stack of experts, all of them active; more ranks than experts leaves ranks with nothing."""

    def __init__(self, width: int, count: int = 3) -> None:
        super().__init__()
        self.first = nn.Parameter(0.3 * torch.randn(count, width, 2 * width))
        self.second = nn.Parameter(0.3 * torch.randn(count, 2 * width, width))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(torch.einsum("btd,edh->ebth", x, self.first))
        return x + self.scale * torch.einsum("ebth,ehd->btd", hidden, self.second)


class Language(nn.Module):
    def __init__(self, layers: list[nn.Module], *, is_tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, wrap: Callable[..., torch.Tensor] | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x) if wrap is None else wrap(layer, x)
        return self.head(x)


class OneParameter(nn.Module):
    """A single weight with fewer rows than ranks, behind two ones that never train."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.embedding.requires_grad_(False)
        self.middle = nn.Linear(WIDTH, 1, bias=False)
        self.head = nn.Linear(1, VOCABULARY, bias=False)
        self.head.requires_grad_(False)
        self.layers = nn.ModuleList([self.middle])

    def forward(self, tokens: torch.Tensor, wrap: Callable[..., torch.Tensor] | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.head(self.middle(x) if wrap is None else wrap(self.middle, x))


class WithUnused(Language):
    """One layer has a weight that no forward reads; another layer never runs."""

    def __init__(self) -> None:
        super().__init__([Block(WIDTH) for _ in range(3)], is_tied=False)
        self.layers[1].unused = nn.Parameter(torch.ones(5, 3))
        self.idle = Block(WIDTH)


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    if name == "dense":
        return Language([Block(WIDTH) for _ in range(4)])
    if name == "experts":
        return Language([Block(WIDTH), Experts(WIDTH), Block(WIDTH), Experts(WIDTH, 5)], is_tied=False)
    if name == "one":
        return OneParameter()
    if name == "shared_layer":
        block = Block(WIDTH)
        return Language([block, Block(WIDTH), block, Block(WIDTH), block])
    assert name == "unused", name
    return WithUnused()


def tokens(step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(0, VOCABULARY, (2, 5), generator=generator)


def loss(model: nn.Module, batch: torch.Tensor, wrap: Callable[..., torch.Tensor] | None = None) -> torch.Tensor:
    logits = model(batch, wrap)
    return F.cross_entropy(logits.flatten(0, 1).double(), batch.roll(1, dims=1).flatten())


@dataclass(frozen=True)
class Trained:
    """What training leaves: the mean loss of each step, and all weights."""

    losses: list[float]
    weights: dict[str, torch.Tensor]


def train_alone(name: str, world_size: int, *, steps: int, micros: int = 1) -> Trained:
    """AdamW in float64 on the batches of all ranks; gradients are means over ranks, sums over micro-batches."""
    model = build(name).double()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    losses = []
    for step in range(steps):
        total = 0.0
        for micro in range(micros):
            for rank in range(world_size):
                value = loss(model, tokens(step, micro, rank)) / world_size
                value.backward()
                total += float(value.detach()) / micros
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return Trained(losses, {key: value.detach() for key, value in model.named_parameters(remove_duplicate=False)})
