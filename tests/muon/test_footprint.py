"""The bytes that a plan tells, of buffers and of messages, are those of real steps."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from dist_pool import joined, run_ranks
from torch.distributed.device_mesh import init_device_mesh

from hp_muon_plugin.config.choices import FloatDtype, TensorParallelMode
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.layout.spec import plain_matrix
from hp_muon_plugin.muon import build_optimizer
from hp_muon_plugin.muon.algorithm import Algorithm, Form, Rule
from hp_muon_plugin.muon.distributed.footprint import Footprint
from hp_muon_plugin.muon.distributed.messages import traffic
from hp_muon_plugin.muon.rule_file import save_table
from hp_muon_plugin.platform.counting import CountingWire
from hp_muon_plugin.platform.wire import C10dWire, Collective
from hp_muon_plugin.train.setup import Launch
from muon.sharded_weights import SHAPES, filled, give_grads, model_of_weights, sharded
from muon.test_distributed_muon import STRATEGIES
from muon.tp_steps import WEIGHTS, Job, run_job

# Long runs of several shapes, so that batches share buffers and chunks are cut.
MORE = SHAPES | {f"wide{i}": (128, 320) for i in range(5)} | {f"tall{i}": (256, 96) for i in range(3)}


def _traffic(launch: Launch, layout: str) -> bool:
    joined(launch)
    mesh = init_device_mesh("cpu", (launch.world_size,))
    for strategy in STRATEGIES:
        wire = CountingWire(C10dWire())
        model = sharded(MORE, layout, mesh)
        with mock.patch("hp_muon_plugin.muon.distributed.optimizer.C10dWire", return_value=wire):
            optimizer = build_optimizer(model, strategy=strategy, clip_grad=0.0)
        give_grads(model, filled(1, MORE))
        optimizer.step()
        counted: dict[str, tuple[int, int]] = {}
        for (kind, _), told in wire.counts().items():
            number, num_bytes = counted.get(str(kind), (0, 0))
            counted[str(kind)] = number + told.num_collectives, num_bytes + told.num_bytes
        (plan,) = optimizer.share_plans
        assert traffic(plan, launch.rank) == counted, strategy
    return True


@pytest.mark.parametrize("layout", ["flat", "fully_shard"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_planned_bytes_are_those_on_the_wire(world_size: int, layout: str) -> None:
    assert run_ranks(world_size, _traffic, layout) == [True] * world_size


def _sizes(launch: Launch, layout: str, options: dict[str, Any]) -> list[tuple[str, int, int]]:
    joined(launch)
    mesh = init_device_mesh("cpu", (launch.world_size,))
    found = []
    for strategy in STRATEGIES:
        model = sharded(MORE, layout, mesh)
        optimizer = build_optimizer(model, strategy=strategy, **options)
        for step in range(2):
            give_grads(model, filled(step + 1, MORE))
            optimizer.step()
        footprint = Footprint(optimizer.config, "cpu", num_threads=torch.get_num_threads())
        for plan in optimizer.share_plans:
            footprint.add_plan(plan, launch.rank)
        found.append((strategy, footprint.nbytes, optimizer._workspace.nbytes))
    return found


@pytest.mark.parametrize("dtype", [FloatDtype.float32, FloatDtype.bfloat16])
@pytest.mark.parametrize("layout", ["flat", "fully_shard"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_predicted_buffers_are_the_real_ones(world_size: int, layout: str, dtype: FloatDtype) -> None:
    for found in run_ranks(world_size, _sizes, layout, {"comm_dtype": dtype}):
        for strategy, predicted, real in found:
            assert predicted == real, (strategy, predicted, real)


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("num_blocks", [1, 3])
def test_predicted_buffers_of_half_precision_products(form: Form, num_blocks: int, tmp_path: Path) -> None:
    """With block rows tall matrices are read as wide ones, and may then be equal to their neighbours."""
    algorithm = Algorithm(form, num_blocks, FloatDtype.bfloat16)
    table = tmp_path / "table.json"
    save_table([Rule("cpu", 1 << 62, 1.0, algorithm, FloatDtype.bfloat16)], table, note="made up")
    for found in run_ranks(3, _sizes, "flat", {"ns_dtype": FloatDtype.bfloat16, "ns_table": str(table)}):
        for strategy, predicted, real in found:
            assert predicted == real, (strategy, predicted, real)


@pytest.mark.parametrize("mode", TensorParallelMode)
@pytest.mark.parametrize(("world_size", "max_stage_bytes"), [(2, 256 << 20), (3, 20_000)])
def test_predicted_buffers_of_tensor_parallel_matrices(
    world_size: int, mode: TensorParallelMode, max_stage_bytes: int
) -> None:
    """Also where one rank owns nothing of a stage, and where products of large sides need a block to mirror."""
    large = {"large": ((210, 600), plain_matrix(210, 600), (210, 600), 1)}
    job = Job(
        HpMuon(tp_mode=mode), weights=WEIGHTS | large, missing=(frozenset(),) * 2, max_stage_bytes=max_stage_bytes
    )
    for place, answer in enumerate(run_ranks(world_size, run_job, job)):
        footprint = Footprint(job.config, "cpu", num_threads=1, places={job.axis: place})
        footprint.add_matrices(job.plan(world_size))
        assert footprint.nbytes == answer.workspace_bytes, place


def _replicas(launch: Launch, divide: bool | None, alone: int) -> tuple[int, int]:
    joined(launch)
    wire = CountingWire(C10dWire())
    with (
        mock.patch("hp_muon_plugin.muon.distributed.replica_plan._ALONE_NUMEL", alone),
        mock.patch("hp_muon_plugin.muon.distributed.optimizer.C10dWire", return_value=wire),
    ):
        return _counted(launch, divide, wire)


def _counted(launch: Launch, divide: bool | None, wire: CountingWire) -> tuple[int, int]:
    model = model_of_weights(MORE)
    optimizer = build_optimizer(model, divide_replicas=divide, clip_grad=0.0)
    for step in range(2):
        wire.reset()
        give_grads(model, filled(step + 1, MORE))
        optimizer.step()
    (plan,) = optimizer.replica_plans
    sent = wire.of(Collective.BROADCAST, plan.axis)
    assert (sent.num_collectives, sent.num_bytes) == (plan.num_messages, plan.sent_bytes)
    assert bool(plan.divided) == (divide is not False)
    footprint = Footprint(optimizer.config, "cpu", num_threads=torch.get_num_threads())
    footprint.add_replicas(plan, launch.rank)
    return footprint.nbytes, optimizer._workspace.nbytes


@pytest.mark.parametrize(("divide", "alone"), [(None, 1 << 20), (True, 1 << 20), (True, 2000), (True, 0), (False, 0)])
@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_of_replicas_that_divide_the_matrices(world_size: int, divide: bool | None, alone: int) -> None:
    """Also where all items, or the large ones, are sent from where they lie."""
    for predicted, real in run_ranks(world_size, _replicas, divide, alone):
        assert predicted == real
