"""What the engine sends, keeps and refuses."""

import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.fsdp import MixedPrecision, ShardMesh, hp_fully_shard, no_sync
from hp_muon_plugin.fsdp.roots import schedule_of
from hp_muon_plugin.fsdp.unit import State
from hp_muon_plugin.fsdp.whole import full_state_dict, initialize, load_full_state_dict
from hp_muon_plugin.platform.collectives import AxisGroup
from hp_muon_plugin.platform.counting import CountingWire
from hp_muon_plugin.platform.strict import StrictWire
from hp_muon_plugin.platform.wire import C10dWire
from hp_muon_plugin.train.setup import Launch
from tests.dist_pool import RankError, joined, run_ranks
from tests.fsdp.small_models import WIDTH, Block, Language, build, loss, tokens

ALONE = ShardMesh(AxisGroup.single("dp_shard"), AxisGroup.single("dp_replicate"))


def sharded(model: nn.Module, mesh: Any, *, unit: dict[str, Any] | None = None, **root: Any) -> nn.Module:
    for layer in model.layers:
        hp_fully_shard(layer, mesh, **(unit or {}), **{key: root[key] for key in ("wire", "mp_policy") if key in root})
    return hp_fully_shard(model, mesh, **root)


def mesh_of(launch: Launch, replicas: int = 1) -> Any:
    if replicas == 1:
        return init_device_mesh("cpu", (launch.world_size,))
    return init_device_mesh("cpu", (replicas, launch.world_size // replicas), mesh_dim_names=("replicate", "shard"))


def step(model: nn.Module, launch: Launch, index: int = 0) -> torch.Tensor:
    value = loss(model, tokens(index, 0, launch.rank))
    value.backward()
    return value.detach()


def _counts(launch: Launch, prefetch: int) -> dict[str, tuple[int, int]]:
    joined(launch)
    wire = CountingWire(C10dWire())
    model = sharded(build("dense"), mesh_of(launch, 2), wire=wire, prefetch=prefetch)
    step(model, launch)
    wire.reset()
    step(model, launch, 1)
    return {
        f"{kind}/{axis}": (traffic.num_collectives, traffic.num_bytes)
        for (kind, axis), traffic in wire.counts().items()
    }


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_one_gather_and_one_reduction_per_unit(prefetch: int) -> None:
    """Four layers and a root: backward finds the root and the last ``prefetch + 1`` layers gathered."""
    for counts in run_ranks(4, _counts, prefetch):
        assert counts["all_gather/shard"][0] == 5 + 4 - (prefetch + 1)
        assert counts["reduce_scatter/shard"][0] == 5
        assert counts["all_reduce/replicate"][0] == 1  # all units fit one group
        assert len(counts) == 3


class Watch(TorchDispatchMode):
    """Operations that copy or take memory, outside of what the model itself computes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if re.search(r"copy|cat|clone|empty|zeros|full", func.overloadpacket.__name__):
            self.found.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _copied(launch: Launch, replicas: int) -> list[str]:
    joined(launch)
    model = sharded(build("dense"), mesh_of(launch, replicas), wire=_Silent())
    for index in range(3):
        with Watch() as watch:
            model(tokens(index, 0, launch.rank)).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None
    return watch.found


class _Silent(C10dWire):
    """The real wire, whose own copies on gloo are not counted: they are what NCCL does inside a collective."""

    def all_gather(self, *args: Any) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            return super().all_gather(*args)

    def reduce_scatter(self, *args: Any) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            return _SilentHandle(super().reduce_scatter(*args))


class _SilentHandle:
    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def wait(self) -> None:
        with torch.utils._python_dispatch._disable_current_modes():
            self._handle.wait()


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_steady_step_copies_and_allocates_nothing(replicas: int) -> None:
    assert run_ranks(4, _copied, replicas) == [[]] * 4


def _held(launch: Launch, prefetch: int) -> int:
    joined(launch)
    model = sharded(Language([Block(WIDTH) for _ in range(6)]), mesh_of(launch), prefetch=prefetch)
    schedule = schedule_of(model)
    most = 0

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, sum(unit.state is not State.sharded for unit in schedule.units if unit is not schedule.root))

    for layer in model.layers:
        layer.register_forward_hook(look)
        layer.register_full_backward_hook(look)
    for index in range(3):
        step(model, launch, index)
    slots = {id(unit.weights_slot) for unit in schedule.units[1:]}
    assert len(slots) == prefetch + 1
    return most


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_at_most_prefetch_plus_one_units_are_whole(prefetch: int) -> None:
    assert run_ranks(2, _held, prefetch) == [prefetch + 1] * 2


def _strict(launch: Launch, replicas: int, outer: str, policy: MixedPrecision | None) -> None:
    joined(launch)
    wire = StrictWire(C10dWire())
    model = sharded(build("experts"), mesh_of(launch, replicas), wire=wire, outer=outer, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(2):
        with no_sync(model):
            step(model, launch, index)
        assert torch.isfinite(step(model, launch, index + 5))
        optimizer.step()
        optimizer.zero_grad()
    wire.verify()


@pytest.mark.parametrize("outer", ["replicate", "broadcast", "shard"])
@pytest.mark.parametrize("policy", [None, MixedPrecision(torch.bfloat16, torch.float32)])
def test_under_the_rules_of_hccl(outer: str, policy: MixedPrecision | None) -> None:
    run_ranks(4, _strict, 2, outer, policy)


def _mixed(launch: Launch, reduce_dtype: torch.dtype) -> None:
    joined(launch)
    mesh = mesh_of(launch)
    ours, theirs = build("dense"), build("dense")
    sharded(ours, mesh, mp_policy=MixedPrecision(torch.bfloat16, reduce_dtype))
    their_policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
    for layer in theirs.layers:
        fully_shard(layer, mesh=mesh, mp_policy=their_policy)
    fully_shard(theirs, mesh=mesh, mp_policy=their_policy)
    for index in range(3):
        assert step(ours, launch, index) == step(theirs, launch, index)
    for name, parameter in theirs.named_parameters():
        mine = dict(ours.named_parameters())[name]
        assert mine.dtype is torch.float32
        assert mine.grad is not None
        info, whole = mine.hp_shard, parameter.grad.full_tensor().reshape(-1)
        # both round sums of bf16 gradients, to bf16 or to float32, in another order
        torch.testing.assert_close(mine.grad.reshape(-1), whole[info.start : info.stop], rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float32])
def test_mixed_precision_as_fully_shard(reduce_dtype: torch.dtype) -> None:
    run_ranks(2, _mixed, reduce_dtype)


def _near(launch: Launch, number: int) -> tuple[float, float, dict[str, Any]]:
    joined(launch)
    wire = CountingWire(C10dWire())
    plain = sharded(build("dense"), mesh_of(launch))
    near = sharded(build("dense"), mesh_of(launch), unit={"reshard_after_forward": number}, wire=wire, prefetch=0)
    for index in range(2):
        wire.reset()
        first, second = step(plain, launch, index), step(near, launch, index)
    for a, b in zip(plain.parameters(), near.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    return float(first), float(second), {axis: traffic.num_collectives for (_, axis), traffic in wire.counts().items()}


def test_backward_gathers_from_the_neighbours() -> None:
    for first, second, calls in run_ranks(4, _near, 2):
        assert first == second
        assert calls["dp_shard by 2"] == 3


def _meta(launch: Launch) -> None:
    joined(launch)

    class Normed(nn.LayerNorm):
        pass

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 7), Normed(7)), nn.Linear(7, 3))

    torch.manual_seed(1)
    want = make()
    with torch.device("meta"):
        model = make()
    hp_fully_shard(model[1], mesh_of(launch))
    hp_fully_shard(model, mesh_of(launch))
    torch.manual_seed(1)
    initialize(model, "cpu")
    for name, value in full_state_dict(model).items():
        assert torch.equal(value, want.state_dict()[name]), name
    x = torch.ones(2, 5)
    assert torch.equal(model(x), want(x))
    load_full_state_dict(model, {name: value + 1 for name, value in want.state_dict().items()})
    assert torch.equal(full_state_dict(model)["0.weight"], want[0].weight + 1)
    with pytest.raises(ConfigError, match="nothing_such"):
        load_full_state_dict(model, {**want.state_dict(), "nothing_such": x})


def test_initialisation_on_the_meta_device_is_that_of_the_whole_model() -> None:
    run_ranks(3, _meta)


def test_a_tied_parameter_of_another_unit_is_refused() -> None:
    model = build("dense")
    hp_fully_shard(model.embedding, ALONE)
    with pytest.raises(ConfigError, match="tied"):
        hp_fully_shard(model, ALONE)


def test_a_module_is_sharded_once() -> None:
    model = hp_fully_shard(nn.Linear(2, 2), ALONE)
    with pytest.raises(ConfigError, match="already"):
        hp_fully_shard(model, ALONE)


def test_neighbours_must_divide_the_shard_ranks() -> None:
    with pytest.raises(ConfigError, match="divisor"):
        hp_fully_shard(nn.Linear(2, 2), ALONE, reshard_after_forward=3)


def _other_config(launch: Launch) -> None:
    joined(launch)
    width = WIDTH + (launch.rank == 1)
    model = nn.Sequential(nn.Linear(width, 3))
    hp_fully_shard(model, mesh_of(launch))
    with pytest.raises(ConfigError, match="rank 1 has .*7.*"):
        model(torch.ones(1, width))


def test_a_rank_with_another_model_is_named_on_every_rank() -> None:
    run_ranks(3, _other_config)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, is_killed: bool) -> torch.Tensor:
        ctx.is_killed = is_killed
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.is_killed:
            os._exit(3)
        raise ValueError("this rank has a reason")


def _failing(launch: Launch, is_killed: bool) -> str:
    joined(launch)
    model = sharded(build("dense"), mesh_of(launch))
    step(model, launch)
    if launch.rank == 1:
        model.layers[1].register_forward_hook(lambda module, args, out: Fails.apply(out, is_killed))
    try:
        step(model, launch, 1)
    except ValueError as error:
        assert launch.rank == 1
        dist.destroy_process_group()
        return str(error)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("nothing failed")


def test_a_rank_that_raises_in_backward_ends_the_others_with_the_unit_named() -> None:
    first, second, third = run_ranks(3, _failing, False)
    assert second == "this rank has a reason"
    for told in (first, third):
        assert "another rank ended" in told
        assert "layers." in told or "Language" in told


def test_a_killed_rank_is_not_waited_for() -> None:
    with pytest.raises(RankError, match="rank 1 died"):
        run_ranks(2, _failing, True, timeout_s=60)
