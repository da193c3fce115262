"""Reductions between replicas: who updates what, and when they begin."""

from typing import Any

import torch
from torch import nn

from hp_muon_plugin.bench.fsdp_cases import Case
from hp_muon_plugin.bench.fsdp_contenders import Setting, build_ours
from hp_muon_plugin.bench.fsdp_rank import make_mesh
from hp_muon_plugin.bench.fsdp_traffic import CountCalls
from hp_muon_plugin.fsdp import hp_fully_shard
from hp_muon_plugin.fsdp.roots import schedule_of
from hp_muon_plugin.platform.collectives import AxisGroup
from hp_muon_plugin.platform.protocol import Expected, Handle
from hp_muon_plugin.platform.wire import C10dWire
from hp_muon_plugin.train.environment import Launch
from tests.dist_pool import joined, run_ranks


def owned_share(launch: Launch, outer_bucket_bytes: int) -> float:
    joined(launch)
    model = nn.Sequential(*[nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(8)]) for _ in range(3)])
    mesh = make_mesh(2)
    for layer in model:
        hp_fully_shard(layer, mesh)
    hp_fully_shard(model, mesh, outer="shard", outer_bucket_bytes=outer_bucket_bytes)
    model(torch.ones(2, 32)).sum().backward()
    shards = list(model.parameters())
    return sum(p.numel() for p in shards if p.grad is not None) / sum(p.numel() for p in shards)


def test_every_rank_updates_its_part_of_its_shard() -> None:
    """Owners went by place in the whole bucket: with a reduction per unit, half of the ranks updated nothing."""
    for outer_bucket_bytes in (100, 1 << 20):
        assert run_ranks(4, owned_share, outer_bucket_bytes) == [0.5] * 4


def default_groups(launch: Launch) -> Any:
    joined(launch)
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(16)])
    for layer in model:
        hp_fully_shard(layer, make_mesh(1))
    hp_fully_shard(model, make_mesh(1))
    return [len(group.buckets) for group in schedule_of(model).reducer.groups]


def test_slow_reductions_begin_before_backward_ends() -> None:
    """All of a model below 32 MiB was one reduction, which nothing could hide."""
    assert run_ranks(2, default_groups) == [[2] * 8] * 2


def owned_of_a_transformer(launch: Launch) -> float:
    joined(launch)
    ours = build_ours(Setting(Case(64, 24), make_mesh(2), has_optimizer=False), outer="shard")
    schedule = schedule_of(ours.model)
    sizes = [0, 0]
    for group in schedule.reducer.groups:
        for part in group.segments:
            sizes[part.owner] += part.stop - part.start
    return sizes[0] / sum(sizes)


def test_every_link_carries_as_much_each_way() -> None:
    """The embedding fills much of one shard, and the head of the other."""
    for share in run_ranks(4, owned_of_a_transformer):
        assert 0.47 < share < 0.53


class Order(C10dWire):
    """Remembers where sums and weights lie, in the order in which they are sent."""

    def __init__(self) -> None:
        super().__init__()
        self.summed: list[torch.Tensor] = []
        self.sent: list[torch.Tensor] = []

    def reduce(
        self, tensor: torch.Tensor, owner_index: int, axis: AxisGroup, *, expected: Expected | None = None
    ) -> Handle:
        self.summed.append(tensor)
        return super().reduce(tensor, owner_index, axis, expected=expected)

    def broadcast(
        self, tensor: torch.Tensor, owner_index: int, axis: AxisGroup, *, expected: Expected | None = None
    ) -> Handle:
        self.sent.append(tensor)
        return super().broadcast(tensor, owner_index, axis, expected=expected)


def places(tensors: list[torch.Tensor], whole: list[torch.Tensor]) -> list[int]:
    starts = [tensor.untyped_storage().data_ptr() for tensor in whole]
    return list(dict.fromkeys(starts.index(tensor.untyped_storage().data_ptr()) for tensor in tensors))


def orders(launch: Launch) -> Any:
    joined(launch)
    wire = Order()
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)) for _ in range(4)], nn.Linear(16, 16))
    for layer in model[:4]:
        hp_fully_shard(layer, make_mesh(2), wire=wire)
    hp_fully_shard(model, make_mesh(2), wire=wire, outer="shard", outer_bucket_bytes=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        wire.summed.clear()
        wire.sent.clear()
        with CountCalls() as counter:
            model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    groups = schedule_of(model).reducer.groups
    summed = places(wire.summed, [group.grad for group in groups])
    sent = places(wire.sent, [group.compute for group in groups if group.compute is not None])
    return summed, sent, sorted(counter.calls.num_calls)


def test_sums_go_as_backward_and_weights_as_forward_reaches_them() -> None:
    """All of it is messages: two collectives of gloo that wait for a slow link hold back all others of a group."""
    for summed, sent, kinds in run_ranks(4, orders):
        assert summed == [0, 1, 2, 3, 4]
        assert sent == [4, 3, 2, 1, 0]
        assert kinds == ["recv", "send"]
