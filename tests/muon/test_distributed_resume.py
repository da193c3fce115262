"""Saving and loading in the middle of a run, and memory that a run keeps."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dist_pool import joined, run_ranks
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hp_muon_plugin.muon import build_optimizer
from hp_muon_plugin.train.setup import Launch
from muon.sharded_weights import Shapes, built, filled, give_grads, sharded, trained

SHAPES: Shapes = {
    "wide": (24, 80),
    "wide_too": (24, 80),
    "tall": (72, 20),
    "square": (32, 32),
    "experts": (6, 8, 20),
    "bias": (7,),
}
GRADIENTS = [filled(seed, SHAPES) for seed in range(1, 6)]
STRATEGIES = ("auto", "allgather", "allgather_dedup", "alltoall", "gram")


def _run_resume(launch: Launch, layout: str, dtype: str) -> bool:
    joined(launch)
    mesh = init_device_mesh("cpu", (launch.world_size,))
    for strategy in STRATEGIES:
        options: dict[str, Any] = {"strategy": strategy, "momentum_dtype": dtype}
        model = sharded(SHAPES, layout, mesh)
        optimizer = build_optimizer(model, **options)
        trained(model, optimizer, GRADIENTS[:2])
        weights = [p.detach().clone() for p in model.parameters()]
        saved = optimizer.state_dict()
        saved["state"] = {
            key: {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in state.items()}
            for key, state in saved["state"].items()
        }
        expected = trained(model, optimizer, GRADIENTS[2:])
        resumed = sharded(SHAPES, layout, mesh)
        with torch.no_grad():
            for param, value in zip(resumed.parameters(), weights, strict=True):
                param.copy_(value)
        other = build_optimizer(resumed, **options)
        other.load_state_dict(saved)
        found = trained(resumed, other, GRADIENTS[2:])
        assert all(torch.equal(found[name], value) for name, value in expected.items()), strategy
    return True


@pytest.mark.parametrize(("layout", "dtype"), [("flat", "float32"), ("fully_shard", "bfloat16")])
def test_a_resumed_run_continues_bit_for_bit(layout: str, dtype: str) -> None:
    assert run_ranks(2, _run_resume, layout, dtype) == [True] * 2


def _save(launch: Launch, folder: Path) -> list[torch.Tensor]:
    joined(launch)
    mesh = init_device_mesh("cpu", (launch.world_size,))
    model = sharded(SHAPES, "fully_shard", mesh)
    optimizer = build_optimizer(model)
    trained(model, optimizer, GRADIENTS[:2])
    weights, state = get_state_dict(model, optimizer)
    momenta = [value for key, value in state["state"].items() if "wide" in key]
    assert all(isinstance(entry["momentum_buffer"], DTensor) for entry in momenta)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    after = trained(model, optimizer, GRADIENTS[2:])
    return [value.numpy() for value in after.values()]


def _load(launch: Launch, folder: Path) -> list[torch.Tensor]:
    joined(launch)
    mesh = init_device_mesh("cpu", (launch.world_size,))
    model = sharded(SHAPES, "fully_shard", mesh)
    optimizer = build_optimizer(model)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    after = trained(model, optimizer, GRADIENTS[2:])
    return [value.numpy() for value in after.values()]


def test_a_distributed_checkpoint_of_fully_shard_resumes_on_other_ranks(tmp_path: Path) -> None:
    """Momenta are DTensors, so torch.distributed.checkpoint divides them anew: 2 ranks, then 2, 3 and 1."""
    expected = run_ranks(2, _save, tmp_path)[0]
    for ranks in (2, 3, 1):
        for found in run_ranks(ranks, _load, tmp_path):
            for value, right in zip(found, expected, strict=True):
                if ranks == 2:
                    assert (value == right).all()
                torch.testing.assert_close(torch.from_numpy(value), torch.from_numpy(right), rtol=1e-5, atol=1e-6)


class _Allocated(TorchDispatchMode):
    """Counts bytes of new tensors that operations make; views and results written into arguments are not new."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.total = (0, ""), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        is_collective = func.namespace == "c10d"  # answers the caller's buffers
        if is_collective or any(ret.alias_info is not None for ret in func._schema.returns):
            return answer
        for made in torch.utils._pytree.tree_leaves(answer):
            if isinstance(made, torch.Tensor):
                self.largest = max(self.largest, (made.numel() * made.element_size(), str(func)))
                self.total += made.numel() * made.element_size()
        return answer


def _run_memory(launch: Launch, layout: str) -> dict[str, tuple[tuple[int, str], int, int]]:
    joined(launch)
    mesh = init_device_mesh("cpu", (launch.world_size,))
    shapes: Shapes = {f"w{i}": shape for i, shape in enumerate([(48, 160), (160, 48), (64, 64)] * 4)}
    answers = {}
    for strategy in STRATEGIES:
        model = sharded(shapes, layout, mesh)
        optimizer = built(model, given={"max_batch_bytes": 4 * 3 * 7680}, strategy=strategy)
        trained(model, optimizer, [filled(1, shapes), filled(2, shapes)])
        version, held = optimizer._workspace.version, optimizer._workspace.nbytes
        give_grads(model, filled(3, shapes))
        with _Allocated() as allocated:
            optimizer.step()
        assert (optimizer._workspace.version, optimizer._workspace.nbytes) == (version, held), strategy
        answers[strategy] = (allocated.largest, allocated.total, held)
    return answers


def test_a_step_allocates_nothing_of_the_size_of_a_matrix() -> None:
    """Votes, norms and scaling factors are new in each step: some bytes for each weight. Buffers do not grow."""
    model_bytes = 4 * 4 * (2 * 48 * 160 + 64 * 64)
    for answers in run_ranks(2, _run_memory, "per_param"):
        for strategy, (largest, total, held) in answers.items():
            assert largest[0] <= 1024, (strategy, largest)
            assert total <= 12 * 1024, (strategy, total)
            # two batches under way of 90 KiB: parts, wholes and updates of each, and the iteration's own
            assert held <= 5 * model_bytes, (strategy, held, model_bytes)


def _run_state(launch: Launch, layout: str) -> int:
    joined(launch)
    model = sharded(SHAPES, layout, init_device_mesh("cpu", (launch.world_size,)))
    optimizer = build_optimizer(model)
    trained(model, optimizer, GRADIENTS[:1])
    momenta = [state["momentum_buffer"] for state in optimizer.state.values() if "momentum_buffer" in state]
    return sum(value.to_local().numel() if isinstance(value, DTensor) else value.numel() for value in momenta)


@pytest.mark.parametrize("layout", ["flat", "fully_shard"])
def test_state_is_kept_once_over_all_ranks(layout: str) -> None:
    muon = sum(value.numel() for name, value in GRADIENTS[0].items() if "bias" not in name)
    assert sum(run_ranks(3, _run_state, layout)) == muon
