"""Several modules as one unit, as ``fully_shard([model.norm, model.output])`` has them."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.fsdp import hp_fully_shard, no_sync
from hp_muon_plugin.fsdp.whole import full_state_dict
from hp_muon_plugin.platform.counting import CountingWire
from hp_muon_plugin.platform.wire import C10dWire
from hp_muon_plugin.train.setup import Launch
from tests.dist_pool import joined, run_ranks
from tests.fsdp.small_models import VOCABULARY, WIDTH, Block, Language, loss, tokens

GROUPS = {
    "next to each other": lambda model: [model.layers[1], model.layers[2]],
    "far apart": lambda model: [model.embedding, model.head],
    "with a layer between": lambda model: [model.layers[0], model.layers[2]],
}


def _model() -> Language:
    torch.manual_seed(3)
    return Language([Block(WIDTH) for _ in range(3)], is_tied=False)


def _mesh(launch: Launch, replicas: int) -> Any:
    if replicas == 1:
        return init_device_mesh("cpu", (launch.world_size,))
    return init_device_mesh("cpu", (replicas, launch.world_size // replicas), mesh_dim_names=("replicate", "shard"))


def _trained(launch: Launch, group: str, replicas: int, outer: str) -> None:
    joined(launch)
    mesh = _mesh(launch, replicas)
    ours, theirs, apart = _model(), _model(), _model()
    hp_fully_shard(GROUPS[group](ours), mesh)
    hp_fully_shard(ours, mesh, outer=outer)
    fully_shard(GROUPS[group](theirs), mesh=mesh)
    fully_shard(theirs, mesh=mesh)
    hp_fully_shard(apart, mesh, outer=outer)  # everything is one unit
    runs = [(model, torch.optim.SGD(model.parameters(), lr=0.5)) for model in (ours, theirs, apart)]
    for step in range(3):
        batch = tokens(step, 0, launch.rank)
        losses = []
        for model, optimizer in runs:
            for parameter in model.parameters():
                parameter.grad = None
            value = loss(model, batch)
            value.backward()
            optimizer.step()
            losses.append(float(value))
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        assert losses[0] == pytest.approx(losses[2], rel=1e-6)
        with torch.no_grad():
            assert torch.equal(loss(ours, batch), loss(apart, batch))  # torch's root would keep these weights too long
    mine = full_state_dict(ours)
    for name, value in full_state_dict(apart).items():
        torch.testing.assert_close(mine[name], value, rtol=1e-6, atol=1e-7)
    for name, value in theirs.named_parameters():
        torch.testing.assert_close(mine[name], value.full_tensor(), rtol=1e-6, atol=1e-7)  # type: ignore[attr-defined]


@pytest.mark.parametrize("group", GROUPS)
def test_they_train_as_torchs_and_as_one_unit(group: str) -> None:
    run_ranks(3, _trained, group, 1, "replicate")


@pytest.mark.parametrize("outer", ["replicate", "shard"])
def test_they_train_with_replicas(outer: str) -> None:
    run_ranks(4, _trained, "next to each other", 2, outer)


def _counted(launch: Launch, group: str) -> dict[str, int]:
    joined(launch)
    mesh, wire, model = _mesh(launch, 1), CountingWire(C10dWire()), _model()
    for layer in model.layers:
        if layer not in GROUPS[group](model):
            hp_fully_shard(layer, mesh, wire=wire)
    hp_fully_shard(GROUPS[group](model), mesh, wire=wire)
    hp_fully_shard(model, mesh, wire=wire)
    for step in range(2):
        wire.reset()
        loss(model, tokens(step, 0, launch.rank)).backward()
    return {kind.value: traffic.num_collectives for (kind, _), traffic in wire.counts().items()}


def test_they_are_gathered_and_reduced_once() -> None:
    """Four units: the root, the pair, and two layers. The last layer before the head stays for backward."""
    for counts in run_ranks(2, _counted, "far apart"):
        assert counts["reduce_scatter"] == 4
        assert counts["all_gather"] <= 2 * 4
    pair, alone = run_ranks(2, _counted, "next to each other")[0], 3
    assert pair["reduce_scatter"] == alone  # the root, the pair, one layer


def _recomputed(launch: Launch, group: str) -> None:
    joined(launch)
    mesh, plain, ours = _mesh(launch, 1), _model(), _model()
    hp_fully_shard(plain, mesh)
    hp_fully_shard(GROUPS[group](ours), mesh)
    hp_fully_shard(ours, mesh)

    def wrap(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=False)  # type: ignore[no-any-return]

    for model in (plain, ours):
        for step in range(3):
            with no_sync(model) if step < 2 else nullcontext():
                model(tokens(step, 0, launch.rank), wrap).square().mean().backward()
    for (name, mine), value in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert (mine.grad is None) == (value[1].grad is None), name
    grads = []
    for model in (plain, ours):
        for parameter in model.parameters():
            parameter.data.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        grads.append(full_state_dict(model))
    for name, value in grads[0].items():
        torch.testing.assert_close(grads[1][name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("group", ["next to each other", "with a layer between"])
def test_recompute_and_accumulation(group: str) -> None:
    run_ranks(2, _recomputed, group)


def _refused(launch: Launch) -> None:
    joined(launch)
    mesh, model = _mesh(launch, 1), _model()
    for wrong, why in (
        ([], "are no modules"),
        ([model.head, "head"], "are no modules"),
        ([model.head, model.head], "have modules in common"),
        ([model.layers[0], model.layers[0].first], "have modules in common"),
    ):
        with pytest.raises(ConfigError, match=why):
            hp_fully_shard(wrong, mesh)
    hp_fully_shard([model.layers[0], model.layers[1]], mesh)
    with pytest.raises(ConfigError, match="sharded already"):
        hp_fully_shard([model.layers[1], model.layers[2]], mesh)
    with pytest.raises(ConfigError, match=r"\[Block, Block\]: are several modules.*\n.*whole model, last"):
        model.layers[0](torch.ones(1, WIDTH))
    other = _model()
    hp_fully_shard([other.head, _model().head], mesh)
    hp_fully_shard(other, mesh)
    with pytest.raises(ConfigError, match="not all of them are in the model that runs"):
        other(torch.zeros(1, 2, dtype=torch.long) % VOCABULARY)


def test_what_makes_no_unit_is_refused() -> None:
    run_ranks(1, _refused)
