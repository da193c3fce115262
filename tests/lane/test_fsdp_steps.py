"""Single steps over shards: types, bad gradients, clipping, and what Megatron's trainers call."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from dist_pool import run_ranks

from hp_muon_plugin.config.choices import OuterMode, Precision
from hp_muon_plugin.config.data_parallel import DataParallel, HpFsdp
from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.config.trainer import Topology, Train
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.models.gpt_specs import gpt_specs
from hp_muon_plugin.models.shard_plan import plan_shards
from hp_muon_plugin.train import setup
from hp_muon_plugin.train.setup import Launch
from lane.harness import (
    VOCAB,
    Ready,
    batches,
    build,
    dense,
    moe,
    start,
    train,
    train_config,
    whole_weights,
    wrapped_model,
)

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
    [
        (Precision.fp32, HpFsdp(replicas=2, outer=OuterMode.shard)),
        pytest.param(Precision.bf16, HpFsdp(), marks=pytest.mark.once),
    ],
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


def _counted(launch: Launch, config: Train) -> Any:
    """The layout that the engine built, what its slots take, and the bytes that arrive in a step."""
    from hp_muon_plugin.megatron.sharded_model import HpFsdpModel
    from hp_muon_plugin.platform.counting import CountingWire
    from hp_muon_plugin.platform.wire import C10dWire, Collective

    ready = build(launch, config)
    wire = CountingWire(C10dWire())
    module = setup.build_model(replace(config, dp=DataParallel()), VOCAB, ready.trainer._platform)[0].module
    model = HpFsdpModel(module.config, None, module, options=config.dp, wire=wire)
    module.config.no_sync_func = model.no_sync
    ready.trainer._model = model
    _forward_backward(ready)
    arriving = {}
    for (kind, axis), traffic in wire.counts().items():
        size = 2 if "replicate" in axis else 4 // config.dp.replicas
        factor = 2 if kind is Collective.ALL_REDUCE else 1
        arriving[str(kind)] = arriving.get(str(kind), 0) + factor * traffic.num_bytes * (size - 1) / size
    units = model.schedule.units
    layouts = [[(b.layout.shard_numel, b.layout.placements) for b in unit.buckets] for unit in units]
    slots = {id(unit.weights_slot): unit.weights_slot.num_bytes for unit in units}
    return layouts, sum(slots.values()), arriving


@pytest.mark.once
@pytest.mark.parametrize(
    "dp",
    [HpFsdp(prefetch=0), HpFsdp(replicas=2, outer=OuterMode.replicate), HpFsdp(shard_accumulated=True)],
    ids=["prefetch0", "replicas", "sharded"],
)
def test_the_dry_run_tells_what_the_engine_does(dp: HpFsdp) -> None:
    config = train_config(dense(num_layers=4), dp=dp, global_batch=8)
    plan = plan_shards(config, gpt_specs(config.model, config.topology, 128, HpMuon()), 4, stage=0)
    layouts, slot_bytes, arriving = run_ranks(4, _counted, config)[0]
    assert [[(b.layout.shard_numel, b.layout.placements) for b in unit.buckets] for unit in plan.units] == [
        [(numel, tuple(replace(p, name=_full_name(unit.name, p.name)) for p in places)) for numel, places in buckets]
        for unit, buckets in zip(plan.units, layouts, strict=True)
    ]
    assert plan.peak_gathered_bytes == slot_bytes
    weights, grads = plan.shard_traffic()
    assert arriving["all_gather"] == weights
    assert arriving["reduce_scatter"] == grads
    assert arriving.get("all_reduce", 0) == plan.replica_traffic()[1]


def _full_name(unit: str, name: str) -> str:
    return name if unit == "root" else f"{unit}.{name}"


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
