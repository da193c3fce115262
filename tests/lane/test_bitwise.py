"""Data parallelism bit for bit: integer-valued gradients have one sum in any order."""

from typing import Any

import pytest
import torch
from dist_pool import run_ranks

from hp_muon_plugin.config.choices import Precision
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.trainer import Model, Topology
from hp_muon_plugin.train.setup import Launch
from lane.harness import build, dense, moe, specs_of, train_config, whole_tensors, whole_weights

STEPS = 20
RANKS = 2


def integer_gradient(name: str, shape: tuple[int, ...], step: int, rank: int) -> torch.Tensor:
    """Small even integers, so that the mean over two ranks is an integer too."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * step + rank)
    return 2.0 * torch.randint(-3, 4, shape, generator=generator).float()


def _steps(launch: Launch, model: Model, precision: Precision) -> Any:
    """Put gradients where backward would, reduce them with Megatron's DDP, and step."""
    options = HpMuon(lr=0.01, weight_decay=0.1, clip_grad=0.0)
    ready = build(launch, train_config(model, Topology(), optimizer=options, precision=precision, steps=STEPS))
    for step in range(STEPS):
        ready.model.zero_grad_buffer()
        ready.optimizer.zero_grad()
        for param, spec in specs_of(ready).items():
            if launch.world_size == 1:
                each = [integer_gradient(spec.name, tuple(param.shape), step, rank) for rank in range(RANKS)]
                param.main_grad.copy_(sum(each) / RANKS)
            else:
                param.main_grad.copy_(integer_gradient(spec.name, tuple(param.shape), step, launch.rank))
        ready.model.finish_grad_sync()
        succeeded, norm, _ = ready.optimizer.step()
        assert succeeded
        ready.schedule.step(increment=1)
        ready.norms.append(norm)
    masters = {pair.model: pair.main for pair in ready.optimizer._pairs}
    return whole_weights(ready), whole_tensors(ready, lambda param: masters[param]), ready.norms


@pytest.mark.parametrize("precision", [Precision.fp32, pytest.param(Precision.bf16, marks=pytest.mark.once)])
@pytest.mark.parametrize("model", [dense(), moe()], ids=["dense", "moe"])
def test_two_ranks_equal_one_bit_for_bit(model: Model, precision: Precision) -> None:
    wanted, masters, norms = run_ranks(1, _steps, model, precision)[0]
    for weights, own_masters, own_norms in run_ranks(RANKS, _steps, model, precision):
        assert own_norms == norms
        for name, tensor in wanted.items():
            assert torch.equal(weights[name], tensor), name
            assert torch.equal(own_masters[name], masters[name]), name
            assert masters[name].dtype == torch.float32
