"""Units whose outputs are views, changed in place by what comes after, as residual connections do."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hp_muon_plugin.fsdp import hp_fully_shard
from hp_muon_plugin.fsdp.whole import full_state_dict
from hp_muon_plugin.train.setup import Launch
from tests.dist_pool import joined, run_ranks

WIDTH = 6


class Viewed(nn.Module):
    """Its output is a view of a product, of its input, or of both in turn."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.inner(x)
        if self.kind == "inputs":
            return y, x.view(-1, WIDTH)
        return y.view(2, -1, WIDTH).transpose(1, 2).transpose(1, 2).view(-1, WIDTH), y.new_zeros(1)


class Model(nn.Module):
    def __init__(self, kind: str, changed: set[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Viewed(kind) for _ in range(4)])
        self.changed = changed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            y, other = layer(x)
            if place in self.changed:
                y += torch.tanh(x)
            else:
                y = y + torch.tanh(x)
            x = y + 0.5 * other
        return x


def _trained(launch: Launch, kind: str, frozen: int | None) -> float:
    joined(launch)
    torch.manual_seed(1)
    whole = Model(kind, set(range(4)) if frozen is None else {frozen})
    if frozen is not None:
        whole.layers[frozen].requires_grad_(False)
    model = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", (launch.world_size,))
    for layer in model.layers:
        hp_fully_shard(layer, mesh)
    hp_fully_shard(model, mesh)
    for step in range(3):
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        for trained in (model, whole):
            optimizer = torch.optim.SGD([p for p in trained.parameters() if p.requires_grad], lr=0.1)
            optimizer.zero_grad()
            trained(batch).square().mean().backward()
            optimizer.step()
    found = full_state_dict(model)
    differences = [float((found[name] - value).abs().max()) for name, value in whole.state_dict().items()]
    return max(differences) if all(value.isfinite().all() for value in found.values()) else float("inf")


@pytest.mark.parametrize("frozen", [None, 1, 3])
@pytest.mark.parametrize("kind", ["products", "inputs"])
def test_a_view_that_is_changed_in_place_trains_as_in_one_process(kind: str, frozen: int | None) -> None:
    """Backward passed the unit by: refused with words about checkpointing, or, if frozen, with another's weights."""
    assert max(run_ranks(2, _trained, kind, frozen)) < 1e-5
