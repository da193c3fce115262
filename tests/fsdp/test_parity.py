"""Training with sharded units equals training in one process in float64."""

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from hp_muon_plugin.fsdp import MixedPrecision, hp_fully_shard, no_sync
from hp_muon_plugin.fsdp.roots import set_requires_all_reduce
from hp_muon_plugin.train.setup import Launch
from tests.dist_pool import joined, run_ranks
from tests.fsdp.small_models import Trained, build, loss, tokens, train_alone

STEPS = 5
# float32 rounding of a few hundred sums of order one, through AdamW, whose first steps divide by
# gradients of any size; the loss sees the mean of these errors
WEIGHT_TOLERANCE, LOSS_TOLERANCE = 3e-5, 2e-6


def train_sharded(launch: Launch, name: str, options: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    joined(launch)
    model = build(name)
    mesh = _mesh(launch, options.get("replicas", 1))
    unit = partial(hp_fully_shard, mesh=mesh, **options.get("unit", {}))
    for layer in dict.fromkeys(model.layers):
        unit(layer)
    if hasattr(model, "idle"):
        unit(model.idle)
    unit(model, **options.get("root", {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses = [_step(model, optimizer, launch, step, options) for step in range(STEPS)]
    with torch.no_grad():
        loss(model, tokens(0, 0, 0))  # weights that another replica updated arrive before a forward
    found = {}
    for key, parameter in model.named_parameters(remove_duplicate=False):
        info = parameter.hp_shard
        found[key] = (info.start, info.stop, parameter.detach().reshape(-1).tolist())
    return losses, found


def _mesh(launch: Launch, replicas: int) -> Any:
    if replicas == 1:
        return init_device_mesh("cpu", (launch.world_size,))
    return init_device_mesh("cpu", (replicas, launch.world_size // replicas), mesh_dim_names=("replicate", "shard"))


def _step(model: nn.Module, optimizer: Any, launch: Launch, step: int, options: dict[str, Any]) -> float:
    micros, total = options.get("micros", 1), 0.0
    wrap = partial(checkpoint, use_reentrant=options["reentrant"]) if "reentrant" in options else None
    for micro in range(micros):
        is_last = micro == micros - 1
        if options.get("accumulate") == "partial":
            set_requires_all_reduce(model, is_last)
        if options.get("accumulate") == "whole" and not is_last:
            with no_sync(model):
                value = loss(model, tokens(step, micro, launch.rank), wrap)
                value.backward()
        else:
            value = loss(model, tokens(step, micro, launch.rank), wrap)
            value.backward()
        total += float(value.detach()) / micros
        if options.get("evaluate"):
            with torch.no_grad():
                loss(model, tokens(99, micro, launch.rank))
    optimizer.step()
    optimizer.zero_grad()
    mean = torch.tensor(total)
    dist.all_reduce(mean)
    return float(mean) / launch.world_size


@cache
def alone(name: str, world_size: int, micros: int) -> Trained:
    return train_alone(name, world_size, steps=STEPS, micros=micros)


def check(name: str, world_size: int, **options: Any) -> None:
    results = run_ranks(world_size, train_sharded, name, options)
    want = alone(name, world_size, options.get("micros", 1))
    for losses, _ in results:
        torch.testing.assert_close(losses, want.losses, rtol=LOSS_TOLERANCE, atol=LOSS_TOLERANCE)
    replicas = options.get("replicas", 1)
    for key, weight in want.weights.items():
        covered = 0
        for _, found in results:
            start, stop, values = found[key]
            covered += stop - start
            got = torch.tensor(values, dtype=torch.float64)
            torch.testing.assert_close(
                got,
                weight.reshape(-1)[start:stop],
                rtol=WEIGHT_TOLERANCE,
                atol=WEIGHT_TOLERANCE,
                msg=partial(_told, key),
            )
        assert covered == replicas * weight.numel(), key


def _told(key: str, message: str) -> str:
    return f"{key}: {message}"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", ["dense", "experts", "one", "unused", "shared_layer"])
def test_every_model_on_every_world_size(name: str, world_size: int) -> None:
    check(name, world_size)


@pytest.mark.parametrize("prefetch", [0, 2, 7])
def test_prefetch_of_any_depth(prefetch: int) -> None:
    check("dense", 2, root={"prefetch": prefetch})


@pytest.mark.parametrize("reshard", [True, False])
def test_resharding_after_forward_or_not(reshard: bool) -> None:
    check("dense", 2, unit={"reshard_after_forward": reshard})


@pytest.mark.parametrize(("world_size", "replicas"), [(1, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("name", ["experts", "unused"])
def test_chunks_of_every_parameter(name: str, world_size: int, replicas: int) -> None:
    unit = {"shard_layout": "per_param"}
    check(name, world_size, replicas=replicas, micros=2, unit=unit, root={"outer": "shard"})


@pytest.mark.parametrize("outer", ["replicate", "broadcast", "shard"])
@pytest.mark.parametrize(("world_size", "replicas"), [(2, 2), (4, 2), (6, 3), (8, 4)])
@pytest.mark.parametrize("outer_bucket_bytes", [100, 1 << 20])
def test_replicas(outer: str, world_size: int, replicas: int, outer_bucket_bytes: int) -> None:
    root = {"outer": outer, "outer_bucket_bytes": outer_bucket_bytes}
    check("experts", world_size, replicas=replicas, root=root)


@pytest.mark.parametrize("accumulate", ["every", "whole", "partial"])
@pytest.mark.parametrize("outer", ["replicate", "shard"])
def test_accumulation(accumulate: str, outer: str) -> None:
    check("experts", 4, replicas=2, micros=3, accumulate=accumulate, root={"outer": outer})


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("micros", [1, 2])
def test_recomputed_activations(reentrant: bool, micros: int) -> None:
    check("dense", 2, reentrant=reentrant, micros=micros)


@pytest.mark.parametrize("outer", ["replicate", "broadcast"])
def test_evaluation_between_steps(outer: str) -> None:
    check("unused", 4, replicas=2, evaluate=True, micros=2, root={"outer": outer})


def _forwards(launch: Launch, outer: str) -> list[float]:
    joined(launch)
    model = build("dense")
    types = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        hp_fully_shard(layer, _mesh(launch, 2), mp_policy=types)
    hp_fully_shard(model, _mesh(launch, 2), mp_policy=types, outer=outer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss(model, tokens(0, 0, launch.rank)).backward()
    optimizer.step()
    with torch.no_grad():
        return [float(loss(model, tokens(1, 0, 0))) for _ in range(3)]


@pytest.mark.parametrize("outer", ["broadcast", "shard"])
def test_weights_of_other_owners_last_for_more_than_one_forward(outer: str) -> None:
    """The second micro-batch cast the old masters of weights that another replica updates, and trained on those."""
    results = run_ranks(4, _forwards, outer)
    assert all(value == results[0][0] for result in results for value in result), results
