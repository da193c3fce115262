"""Missing and bad gradients on several ranks: one answer everywhere, and never a hang."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import joined, run_ranks

from hp_muon_plugin.errors import GradientError
from hp_muon_plugin.muon import build_optimizer
from hp_muon_plugin.train.setup import Launch


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))


def ready(launch: Launch) -> tuple[torch.nn.Sequential, Any]:
    joined(launch)
    torch.manual_seed(0)
    net = model()
    optimizer = build_optimizer(net, lr=0.1)
    for param in net.parameters():
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(7))
    return net, optimizer


def _missing_on_rank_0(launch: Launch) -> str:
    net, optimizer = ready(launch)
    if launch.rank == 0:
        net[1].weight.grad = None
    try:
        optimizer.step()
    except GradientError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_gradient_missing_on_one_rank_is_the_same_error_on_all(ranks: int) -> None:
    """KellerJordan #37: others hang, or update an unrelated weight with the wrong data."""
    messages = run_ranks(ranks, _missing_on_rank_0)
    assert len(set(messages)) == 1
    assert messages[0].startswith("1.weight: gradient on some ranks and none on others")


def _missing_everywhere(launch: Launch) -> tuple[bool, int]:
    net, optimizer = ready(launch)
    net[1].weight.grad = None
    before = net[1].weight.detach().clone()
    optimizer.step()
    return torch.equal(before, net[1].weight.detach()), optimizer.num_orthogonalized


def test_a_gradient_missing_on_all_ranks_leaves_the_weight_alone() -> None:
    assert run_ranks(2, _missing_everywhere) == [(True, 1)] * 2


def _bad_on_last_rank(launch: Launch) -> tuple[int, bool]:
    net, optimizer = ready(launch)
    before = [p.detach().clone() for p in net.parameters()]
    if launch.rank == launch.world_size - 1:
        net[0].weight.grad[0, 0] = float("inf")
    optimizer.step()
    return optimizer.skipped_steps, all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_a_bad_gradient_on_one_rank_skips_the_step_on_all() -> None:
    assert run_ranks(3, _bad_on_last_rank) == [(1, True)] * 3


def _collectives_per_step(launch: Launch) -> int:
    _, optimizer = ready(launch)
    counted = 0
    real = dist.all_reduce

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal counted
        counted += 1
        return real(*args, **kwargs)

    dist.all_reduce = counting
    try:
        optimizer.step()
    finally:
        dist.all_reduce = real
    return counted


def test_agreement_costs_one_collective() -> None:
    assert run_ranks(2, _collectives_per_step) == [1, 1]


def _alone(launch: Launch) -> bool:
    net = model()
    optimizer = build_optimizer(net)
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return dist.is_initialized()


def test_one_process_without_a_process_group_works() -> None:
    """muon-fsdp2 0.3.0: NameError on a single device."""
    assert run_ranks(1, _alone) == [False]
