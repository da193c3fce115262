"""Single steps over shards: types, bad gradients, clipping, and what Megatron's trainers call."""

import copy
from typing import Any

import pytest
import torch
from dist_pool import run_ranks

from hp_muon_plugin.config.choices import OuterMode, Precision
from hp_muon_plugin.config.data_parallel import HpFsdp
from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.config.trainer import Topology
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.train.setup import Launch
from lane.harness import Ready, batches, build, dense, moe, start, train, train_config, whole_weights, wrapped_model

EP = Topology(ep=2)


def _bf16(launch: Launch, dp: HpFsdp | None, optimizer: Any) -> Any:
    config = train_config(moe(), EP, dp=dp, optimizer=optimizer, precision=Precision.bf16, global_batch=8)
    ready = train(build(launch, config), 5)
    return ready.losses, ready.norms, whole_weights(ready)


@pytest.mark.parametrize(
    ("optimizer", "dp"),
    [(AdamW(lr=5e-3), HpFsdp(replicas=2, outer=OuterMode.shard)), (HpMuon(), HpFsdp())],
    ids=["adamw-hsdp", "hp_muon-fsdp"],
)
def test_bf16_trains_as_megatrons_wrapper_does(optimizer: AdamW | HpMuon, dp: HpFsdp) -> None:
    """Both compute in bf16, reduce in float32 and update float32 masters; only the order of sums differs."""
    wanted = run_ranks(4, _bf16, None, optimizer)[0]
    losses, norms, weights = run_ranks(4, _bf16, dp, optimizer)[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted[0]), rtol=0, atol=5e-3)
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(wanted[1]), rtol=2e-2, atol=1e-3)
    worst = 0.0
    for name, weight in weights.items():
        assert weight.dtype is torch.bfloat16
        target = wanted[2][name].float()
        worst = max(worst, float((weight.float() - target).norm() / target.norm()))
    print("worst", worst)
    assert worst < 3e-2


def _bad_step(launch: Launch, precision: Precision, dp: HpFsdp) -> Any:
    ready = train(build(launch, train_config(moe(), EP, dp=dp, precision=precision)), 2)
    state = copy.deepcopy(ready.optimizer.state_dict())
    before = whole_weights(ready)
    ready.model.zero_grad_buffer()
    ready.optimizer.zero_grad()
    ready.trainer._forward_backward(batches(ready.config, ready.trainer._dp_rank, 4), forward_only=False)
    if launch.rank == launch.world_size - 1:
        owned = next(
            pair.model for pair in reversed(ready.optimizer._pairs) if not getattr(pair.model, "allreduce", True)
        )
        owned.main_grad.view(-1)[0] = float("nan")  # one number of one expert that this rank alone updates
    answer = ready.optimizer.step()
    after, now = ready.optimizer.state_dict(), whole_weights(ready)
    same = all(torch.equal(before[name], now[name]) for name in before)
    for key, entry in state["optimizer"]["state"].items():
        same &= all(torch.equal(value, after["optimizer"]["state"][key][name]) for name, value in entry.items())
    return answer, same, ready.optimizer.num_skipped, train(ready, 1).norms[-1]


@pytest.mark.parametrize(
    ("precision", "dp"),
    [(Precision.fp32, HpFsdp(replicas=2, outer=OuterMode.shard)), (Precision.bf16, HpFsdp())],
    ids=["fp32-hsdp", "bf16-fsdp"],
)
def test_a_nan_in_one_shard_skips_the_step_everywhere(precision: Precision, dp: HpFsdp) -> None:
    for answer, same, skipped, norm in run_ranks(4, _bad_step, precision, dp):
        assert answer == (False, None, None)
        assert same
        assert skipped == 1
        assert norm is not None


def _layout(launch: Launch) -> Any:
    model: Any = wrapped_model(launch, train_config(moe(), EP, dp=HpFsdp()))
    unwrapped = model.module
    names = [unit.name for unit in model.schedule.units]
    buckets = {
        unit.name: [(b.mesh.shard.size, b.divisor, sorted(p.name for p in b.parameters)) for b in unit.buckets]
        for unit in model.schedule.units
    }
    shards = {p.numel() for p in unwrapped.parameters()}
    marks = [p.main_grad.shape == p.shape and not p.main_grad.any() for p in model.parameters()]
    return names, buckets, len(shards) > 1, all(marks)


def test_layers_and_ends_are_units_and_experts_lie_on_their_own_ranks() -> None:
    names, buckets, _, has_grads = run_ranks(4, _layout)[0]
    assert sorted(names) == ["GPTModel", "decoder.layers.0", "decoder.layers.1", "embedding", "output_layer"]
    assert has_grads
    experts, rest = sorted(buckets["decoder.layers.0"])
    assert experts[:2] == (2, 4.0)
    assert all("local_experts" in name for name in experts[2])
    assert rest[:2] == (4, 4.0)
    assert not any("local_experts" in name for name in rest[2])
    assert buckets["GPTModel"] == [(4, 4.0, ["decoder.final_layernorm.weight"])]


def _unreduced(launch: Launch) -> str:
    ready = build(launch, train_config(dense(), dp=HpFsdp()))
    with ready.model.no_sync():
        try:
            _forward_backward(ready)
        except RuntimeError as error:
            return str(error)
    return "nothing"


def _forward_backward(ready: Ready) -> None:
    ready.trainer._forward_backward(batches(ready.config, ready.trainer._dp_rank, 2), forward_only=False)


def test_a_step_that_never_reduces_is_an_error() -> None:
    """megatron-core enters no_sync by itself for all micro-batches but the last; a trainer must not for that one."""
    assert "leave no_sync() before the backward pass of the last micro-batch" in run_ranks(2, _unreduced)[0]


def _refused(launch: Launch, name: str) -> str:
    from megatron.core.distributed import DistributedDataParallelConfig

    from hp_muon_plugin.megatron.sharded_model import HpFsdpModel
    from hp_muon_plugin.models.gpt import build_gpt, transformer_config

    config = train_config(dense())
    start(launch, config)
    core = transformer_config(config.model, config.topology, Precision.fp32)
    module = build_gpt(core, config.model, 128)
    ddp_config = DistributedDataParallelConfig()
    setattr(core if hasattr(core, name) else ddp_config, name, True)
    with pytest.raises(ConfigError) as caught:
        HpFsdpModel(core, ddp_config, module)
    return str(caught.value)


@pytest.mark.parametrize("name", ["gradient_accumulation_fusion", "use_distributed_optimizer"])
def test_what_needs_megatrons_gradient_buffers_is_refused(name: str) -> None:
    assert f"set {name}=False" in run_ranks(1, _refused, name)[0]


def test_no_method_of_megatrons_wrapper_is_left_that_reads_its_buffers(megatron_on_cpu: str) -> None:
    """The wrapper is a DistributedDataParallel whose constructor never ran."""
    from megatron.core.distributed import DistributedDataParallel

    from hp_muon_plugin.megatron.sharded_model import HpFsdpModel

    public = {name for name in vars(DistributedDataParallel) if not name.startswith("_")}
    assert public - set(vars(HpFsdpModel)) == set()
