"""What Megatron asks before a step: is a gradient bad, missing, or of a parameter that nobody updates?"""

from typing import Any

import pytest
import torch
from dist_pool import run_ranks

from hp_muon_plugin.config.choices import NonFinite
from hp_muon_plugin.config.data_parallel import HpFsdp
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.trainer import Topology
from hp_muon_plugin.errors import ConfigError, GradientError
from hp_muon_plugin.train import setup
from hp_muon_plugin.train.setup import Launch
from lane.harness import batches, build, dense, moe, specs_of, start, train, train_config, wrapped_model


def _ready_with_nan(launch: Launch, policy: NonFinite = NonFinite.skip) -> Any:
    options = HpMuon(lr=1e-2, non_finite=policy)
    ready = train(build(launch, train_config(moe(), Topology(ep=launch.world_size), optimizer=options)), 1)
    ready.model.zero_grad_buffer()
    if launch.rank == 0:
        next(p for p, s in specs_of(ready).items() if "local_experts" in s.name).main_grad[0, 0] = float("nan")
    return ready


def _found_inf(launch: Launch) -> Any:
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    ready = _ready_with_nan(launch)
    before = [param.detach().clone() for param in ready.model.parameters()]
    found = ready.optimizer.prepare_grads()
    chained = ChainedOptimizer([ready.optimizer]).step()
    same = all(torch.equal(a, b) for a, b in zip(before, ready.model.parameters(), strict=True))
    ready.model.zero_grad_buffer()
    return found, chained, same, ready.optimizer.num_skipped, ready.optimizer.prepare_grads()


def test_a_nan_on_one_rank_is_found_on_all_before_the_step() -> None:
    """``prepare_grads`` said False always, and a ChainedOptimizer, which asks it alone, took the step with NaN."""
    assert run_ranks(2, _found_inf) == [(True, (False, None, None), True, 2, False)] * 2


def _cut_layer(launch: Launch, topology: Topology, how: str) -> Any:
    """The MLP of the last layer takes no part in the loss: on all ranks, on one, or but for a factor 0."""
    config = train_config(dense(), topology, optimizer=HpMuon(missing_grad="error"))
    ready = build(launch, config)

    def cut(_module: Any, _inputs: Any, output: Any) -> Any:
        if how == "zero" or (how == "zero of one" and launch.rank):
            return output[0] * 0, output[1]
        return output if how == "one" and launch.rank else (torch.zeros_like(output[0]), output[1])

    for param, spec in specs_of(ready).items():
        if spec.name.endswith("layers.1.mlp.linear_fc1.weight"):
            (mlp,) = [
                m
                for m in ready.model.modules()
                if any(p is param for c in m.children() for p in c.parameters(recurse=False))
            ]
            mlp.register_forward_hook(cut)
    messages = []
    stream = batches(config, ready.trainer._dp_rank, ready.trainer._dp_size)
    for _ in range(2):
        try:
            ready.trainer._step(stream)
        except GradientError as error:
            messages.append(str(error).splitlines()[0])
    return messages


@pytest.mark.parametrize(("ranks", "topology"), [(1, Topology()), (2, Topology()), (2, Topology(pp=2))])
def test_a_weight_that_took_no_part_is_an_error_if_asked_for(ranks: int, topology: Topology) -> None:
    """The wrapper's buffer is zero where nothing arrived, so ``missing_grad=error`` never was one."""
    *others, last = run_ranks(ranks, _cut_layer, topology, "all")
    assert len(last) == 2
    assert last[0].startswith("decoder.layers.1.")
    assert "decoder.layers.1.mlp.linear_fc1.weight" in last[0]
    assert last[0].endswith("no gradient (optimizer.missing_grad=error)")
    for other in others:
        name = last[0].split(":")[0] if topology.pp == 1 else "a parameter of another rank"
        assert other == [f"{name}: no gradient (optimizer.missing_grad=error)"] * 2


@pytest.mark.parametrize("how", ["one", "zero", "zero of one"])
def test_a_gradient_of_zero_or_of_one_data_parallel_rank_is_not_missing(how: str) -> None:
    assert run_ranks(2, _cut_layer, Topology(), how) == [[], []]


def _idle_expert(launch: Launch) -> Any:
    """Experts over two ranks with two copies each; one copy takes no part, the other has zero gradients."""
    config = train_config(moe(), Topology(ep=2), optimizer=HpMuon(missing_grad="error"))
    ready = build(launch, config)

    def cut(_module: Any, _inputs: Any, output: Any) -> Any:
        return (output[0] * 0 if launch.rank >= 2 else torch.zeros_like(output[0]), output[1])

    cuts = [m.register_forward_hook(cut) for n, m in ready.model.named_modules() if n.endswith("layers.1.mlp.experts")]
    train(ready, 2)
    return len(cuts), ready.optimizer.num_skipped


def test_experts_are_not_missing_while_one_copy_learns() -> None:
    assert run_ranks(4, _idle_expert) == [(1, 0)] * 4


def _unfrozen(launch: Launch, topology: Topology) -> Any:
    config = train_config(dense(), topology, optimizer=HpMuon(lr=0.1))
    model = wrapped_model(launch, config)
    late = [p for n, p in model.named_parameters() if n.endswith("final_layernorm.weight")]
    for param in late:
        param.requires_grad_(False)
    optimizer = setup.build_optimizer(config, model)
    next(model.parameters()).main_grad.fill_(1.0)  # a first step in which nothing took part would be an error
    answers = []
    for thawed in (False, True, False):
        for param in late:
            param.requires_grad_(thawed)
        try:
            answers.append(optimizer.step()[0])
        except GradientError as error:
            answers.append(str(error).split(",")[0])
    return answers


@pytest.mark.parametrize("topology", [Topology(), Topology(pp=2)])
def test_an_unfrozen_parameter_is_an_error_on_every_rank_and_no_silence(topology: Topology) -> None:
    """It was in no group, so it kept its first value however long it was trained."""
    first, last = run_ranks(2, _unfrozen, topology)
    assert last == [True, "decoder.final_layernorm.weight: requires a gradient now", True]
    assert first == (last if topology.pp == 1 else [True, "a parameter of another rank: requires a gradient now", True])


def _without_buffer(launch: Launch, is_sharded: bool) -> str:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from hp_muon_plugin.config.choices import Precision
    from hp_muon_plugin.megatron.sharded_model import HpFsdpModel
    from hp_muon_plugin.models.gpt import build_gpt, transformer_config

    config = train_config(dense(), dp=HpFsdp() if is_sharded else None)
    start(launch, config)
    core = transformer_config(config.model, config.topology, Precision.fp32)
    module = build_gpt(core, config.model, 128)
    module.decoder.final_layernorm.weight.requires_grad_(False)
    model = (HpFsdpModel if is_sharded else DistributedDataParallel)(core, DistributedDataParallelConfig(), module)
    module.decoder.final_layernorm.weight.requires_grad_(True)
    try:
        setup.build_optimizer(config, model)
    except ConfigError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("is_sharded", [False, True], ids=["ddp", "hp_fsdp"])
def test_a_parameter_that_the_wrapper_does_not_reduce_is_refused(is_sharded: bool) -> None:
    """Unfrozen between wrapping and building: ranks would train it apart, and over shards it kept its first value."""
    text = run_ranks(1, _without_buffer, is_sharded)[0]
    assert text.startswith("model_chunks=decoder.final_layernorm.weight: was frozen when the model was wrapped")
