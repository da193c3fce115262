"""Steps whose gradients are not usable, as Megatron's trainers see them."""

import copy
from typing import Any

import pytest
import torch
from dist_pool import run_ranks

from hp_muon_plugin.config.choices import NonFinite, Precision
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.trainer import Topology, Train
from hp_muon_plugin.errors import GradientError
from hp_muon_plugin.train.setup import Launch
from lane.harness import (
    build,
    dense,
    moe,
    specs_of,
    start,
    train,
    train_config,
)


def _bad_step(launch: Launch, precision: Precision, policy: NonFinite) -> Any:
    options = HpMuon(lr=1e-2, non_finite=policy)
    topology = Topology(ep=launch.world_size)
    ready = build(launch, train_config(moe(), topology, optimizer=options, precision=precision))
    train(ready, 2)
    state = copy.deepcopy(ready.optimizer.state_dict())
    weights = [param.detach().clone() for param in ready.model.parameters()]
    lr = [group["lr"] for group in ready.optimizer.param_groups]
    ready.model.zero_grad_buffer()
    if launch.rank == launch.world_size - 1:  # one expert of the last rank only
        name, param = next((s.name, p) for p, s in specs_of(ready).items() if "local_experts" in s.name)
        param.main_grad[0, 0] = float("nan")
    try:
        answer = ready.optimizer.step()
    except GradientError as error:
        answer = str(error).splitlines()[0]
    after = ready.optimizer.state_dict()
    same = all(torch.equal(a, b) for a, b in zip(weights, ready.model.parameters(), strict=True))
    same &= all(torch.equal(a, b) for a, b in zip(state["main_params"], after["main_params"], strict=True))
    for key, entry in state["optimizer"]["state"].items():
        for field, value in entry.items():
            same &= torch.equal(value, after["optimizer"]["state"][key][field])
    same &= lr == [group["lr"] for group in ready.optimizer.param_groups]
    return answer, same, ready.optimizer.num_skipped


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16])
def test_a_nan_on_one_rank_skips_the_step_on_all_and_changes_nothing(precision: Precision) -> None:
    for answer, same, skipped in run_ranks(2, _bad_step, precision, NonFinite.skip):
        assert answer == (False, None, None)
        assert same
        assert skipped == 1


def test_a_nan_is_an_error_if_asked_for() -> None:
    first, last = run_ranks(2, _bad_step, Precision.fp32, NonFinite.error)
    assert first[0].startswith("a parameter of another rank: gradient is NaN")
    assert last[0].startswith("decoder.layers.0.mlp.experts.local_experts.2.linear_fc1.weight: gradient is NaN")
    assert first[1]
    assert last[1]


def _unwrapped(launch: Launch, config: Train) -> tuple[Any, Any]:
    """Megatron's configuration, and this stage's model before the wrapper is built."""
    from hp_muon_plugin.config.choices import Precision
    from hp_muon_plugin.models.canonical_init import initialize_canonically
    from hp_muon_plugin.models.gpt import build_gpt, transformer_config

    start(launch, config)
    core = transformer_config(config.model, config.topology, Precision.fp32)
    module = build_gpt(core, config.model, 128)
    initialize_canonically(module, seed=1, std=0.02)
    return core, module


def _wrapped(config: Train, core: Any, module: torch.nn.Module) -> tuple[Any, Any]:
    """The model in Megatron's wrapper, and an optimizer whose learning rates are all 0.1."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from hp_muon_plugin.train import setup

    model = DistributedDataParallel(core, DistributedDataParallelConfig(), module)
    optimizer = setup.build_optimizer(config, model)
    setup.build_schedule(config, optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    return model, optimizer


def _frozen_and_unused(launch: Launch) -> Any:
    """One weight frozen before the wrapper is built, and one that gets no gradient on rank 1."""
    config = train_config(dense(), optimizer=HpMuon(lr=0.1, weight_decay=0.0, clip_grad=0.0))
    core, module = _unwrapped(launch, config)
    frozen = module.decoder.layers[0].mlp.linear_fc1.weight
    frozen.requires_grad_(False)
    model, optimizer = _wrapped(config, core, module)
    unused, grads = module.decoder.layers[1].mlp.linear_fc2.weight, torch.ones(32, 48)
    before = frozen.detach().clone(), unused.detach().clone()
    if launch.rank == 0:
        unused.main_grad.copy_(2 * grads)
    model.finish_grad_sync()
    succeeded, _, _ = optimizer.step()
    held = sum(v.numel() for s in optimizer.state.values() for n, v in s.items() if n == "momentum_buffer")
    muon = sum(p.numel() for g in optimizer.param_groups if g["algorithm"] == "muon" for p in g["params"])
    moved = unused.detach() - before[1]
    return succeeded, torch.equal(frozen, before[0]), moved, unused.main_grad.clone(), (held, muon)


def test_frozen_weights_stay_and_a_gradient_missing_on_one_rank_counts_as_zero() -> None:
    results = run_ranks(2, _frozen_and_unused)
    for succeeded, frozen_same, moved, mean_grad, (held, muon) in results:
        assert succeeded
        assert frozen_same
        assert torch.equal(mean_grad, torch.ones(32, 48))
        assert float(moved.abs().max()) > 0
        assert held == muon
    assert torch.equal(results[0][2], results[1][2])


def _stage_without_matrices(launch: Launch) -> Any:
    """The matrices of the last stage are frozen: norms and the output layer are all that it trains."""
    config = train_config(dense(), Topology(pp=2), optimizer=HpMuon(lr=0.1, weight_decay=0.0, clip_grad=1.0))
    core, module = _unwrapped(launch, config)
    if launch.rank == 1:
        for name, param in module.named_parameters():
            param.requires_grad_("layernorm" in name or "output_layer" in name)
    model, optimizer = _wrapped(config, core, module)
    trained = [param for param in module.parameters() if param.requires_grad]
    before = [param.detach().clone() for param in trained]
    for param in trained:
        param.main_grad.fill_(1.0)
    model.finish_grad_sync()
    succeeded, norm, _ = optimizer.step()
    moved = [not torch.equal(param, kept) for param, kept in zip(trained, before, strict=True)]
    squares = sum(param.numel() for param in trained)
    return succeeded, norm, all(moved), squares, optimizer.optimizer.num_orthogonalized


def test_a_stage_without_matrices_steps_with_the_others() -> None:
    """torchtitan: a pipeline stage that Muon had no parameters of failed to build."""
    first, last = run_ranks(2, _stage_without_matrices)
    assert (first[0], first[2], last[0], last[2]) == (True,) * 4
    assert (first[4] > 0, last[4]) == (True, 0)
    assert first[1] == last[1] == pytest.approx((first[3] + last[3]) ** 0.5)
