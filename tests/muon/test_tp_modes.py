"""The ways of tensor-parallel matrices: all but blockwise give the update of the whole matrix."""

from typing import Any

import pytest
import torch
from dist_pool import run_ranks

from hp_muon_plugin.config.choices import Schedule, TensorParallelMode
from hp_muon_plugin.config.optimizer import HpMuon, MuonRates
from hp_muon_plugin.layout.spec import plain_matrix
from hp_muon_plugin.muon import blockwise
from hp_muon_plugin.muon.optimizer import HpMuonOptimizer
from hp_muon_plugin.muon.pieces import Way
from hp_muon_plugin.muon.reference import reference_newton_schulz
from tests.muon.tp_steps import WEIGHTS, Job, counted, run_job

DUPLICATED, DISTRIBUTED = TensorParallelMode.duplicated, TensorParallelMode.distributed
OWNER, BLOCKWISE = TensorParallelMode.owner, TensorParallelMode.blockwise
EXACT = (DUPLICATED, DISTRIBUTED, OWNER)
MISSING = (frozenset[str](), frozenset({"gated", "qkv", "row, wide", "whole"}), frozenset(WEIGHTS))


def job_of(mode: TensorParallelMode, *, options: dict[str, Any] | None = None, **arguments: Any) -> Job:
    return Job(HpMuon(tp_mode=mode, clip_grad=0.0, **(options or {})), **arguments)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("mode", EXACT)
def test_the_update_is_that_of_the_whole_matrix(mode: TensorParallelMode, size: int) -> None:
    job = job_of(mode, missing=(*MISSING, frozenset()))
    results = run_ranks(size, run_job, job)
    assert max(job.errors(results).values()) < 1e-6, job.errors(results)
    plan = job.plan(size)
    for index, result in enumerate(results):
        assert (result.received, result.num_collectives) == counted(plan, index)
    assert plan.received_bytes == max(result.received for result in results)


@pytest.mark.parametrize("mode", [DISTRIBUTED, OWNER])
def test_other_types_many_stages_and_lists(mode: TensorParallelMode) -> None:
    """bf16 weights, float32 gradients and bf16 momentum; stages so small that most pieces have their own."""
    types = (torch.bfloat16, torch.float32, torch.bfloat16)
    job = job_of(mode, dtypes=types, max_stage_bytes=20_000, by_lists=True, axis="etp")
    results = run_ranks(2, run_job, job)
    plan = job.plan(2)
    assert len(plan.stages) > 4
    assert all((result.received, result.num_collectives) == counted(plan, i) for i, result in enumerate(results))
    whole = run_ranks(2, run_job, job_of(DUPLICATED, dtypes=types, axis="etp"))
    for name in WEIGHTS:
        got, wanted = job.whole(name, results), job.whole(name, whole)
        # one rounding of bf16 (2^-8 of an entry) where sums differ in the last bit of float32
        assert float((got - wanted).abs().max()) <= 2**-7 * float(wanted.abs().max()), name
        assert float((got - wanted).norm() / wanted.norm()) < 1e-3, name


@pytest.mark.parametrize("schedule", [Schedule.polar_express, Schedule.deepseek_v4, Schedule.you])
def test_schedules_that_look_at_the_matrix_again(schedule: Schedule) -> None:
    """Long schedules need several runs: Gram matrices are summed once for each."""
    job = job_of(DISTRIBUTED, options={"schedule": schedule})
    results = run_ranks(2, run_job, job)
    assert max(job.errors(results).values()) < 2e-6, job.errors(results)
    plan = job.plan(2)
    assert (results[0].received, results[0].num_collectives) == counted(plan, 0)
    runs = [stage.num_runs for stage in plan.stages if stage.way is Way.gram]
    assert all((n > 1) == (schedule is not Schedule.you) for n in runs)


@pytest.mark.parametrize("mode", EXACT)
def test_size_of_the_entries_does_not_matter(mode: TensorParallelMode) -> None:
    """Squares of 1e25 overflow and squares of 1e-30 vanish in float32."""
    scales = {"column, tall": 1e25, "row, wide": 1e-30, "gated": 1e-38, "qkv": 1e18, "column, square": 0.0}
    job = job_of(mode, scales=scales)
    results = run_ranks(2, run_job, job)
    errors = job.errors(results)
    assert max(errors.values()) < 1e-6, errors


@pytest.mark.parametrize("mode", EXACT)
def test_nan_stays_in_its_matrix_and_reaches_all_ranks(mode: TensorParallelMode) -> None:
    job = job_of(mode, holes=frozenset({"column, tall", "row, wide"}), missing=(frozenset(),))
    results = run_ranks(3, run_job, job)
    for name in WEIGHTS:
        got = job.whole(name, results)
        if name in job.holes:
            assert got.isnan().all(), name
        else:
            assert float((got.double() - job.reference(name)).norm() / job.reference(name).norm()) < 1e-6, name


def test_whole_matrices_need_no_communication_in_any_mode() -> None:
    weights = {name: WEIGHTS[name] for name in ("per head", "experts", "whole")}
    for mode in TensorParallelMode:
        plan = job_of(mode, weights=weights).plan(4)
        assert [stage.way for stage in plan.stages] == [Way.local]
        assert plan.received_bytes == 0
        assert plan.num_matrices == 48 // 4 + 12 // 4 + 1


def test_what_distributed_does_with_each_matrix() -> None:
    plan = job_of(DISTRIBUTED).plan(4)
    ways = {piece.spec.name: (piece.way, piece.why) for piece in plan.pieces}
    assert ways["column, tall"] == ways["row, wide"] == ways["column, square"] == (Way.gram, "")
    assert ways["qkv[q]"] == ways["qkv[k]"] == (Way.gram, "")
    assert ways["column, wide"][0] is ways["row, tall"][0] is Way.gather
    assert "cut along the short side (24): gram matrices of side 60 would cost" in ways["column, wide"][1]
    assert ways["tiny"] == (Way.gather, "short side 4 is below 12")
    assert ways["one group"] == (Way.gather, "ranks hold unequal shares of its matrices")
    assert ways["per head"] == ways["experts"] == (Way.local, "each rank holds whole matrices")


def test_gram_matrices_of_the_long_side_where_they_cost_less() -> None:
    """Hardly longer than wide, and so large that iterating on every rank costs more than the sum."""
    weights = {"w": ((1020, 1024), plain_matrix(1020, 1024), (1020, 1024), 0)}
    (piece,) = job_of(DISTRIBUTED, weights=weights).plan(4).pieces
    assert piece.way is Way.gram
    assert piece.why == "gram matrices of the long side (1024) cost less than a gather"


@pytest.mark.parametrize(("bytes_per_s", "way"), [(1e6, Way.gather), (1e9, Way.gram)])
def test_stated_rates_decide_about_the_long_side(bytes_per_s: float, way: Way) -> None:
    """There was a table of rates for tensor-parallel matrices alone, which options did not reach."""
    weights = {"w": ((1020, 1024), plain_matrix(1020, 1024), (1020, 1024), 0)}
    options = {"rates": MuonRates(bytes_per_s=bytes_per_s)}
    (piece,) = job_of(DISTRIBUTED, options=options, weights=weights).plan(4).pieces
    assert piece.way is way


def test_gram_matrices_of_the_long_side_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have as many zero eigenvalues as the matrix has rows too few."""
    weights = {"w": ((30, 32), plain_matrix(30, 32), (30, 32), 0), "v": ((32, 28), plain_matrix(32, 28), (32, 28), 1)}
    job = job_of(DISTRIBUTED, weights=weights)
    monkeypatch.setattr("hp_muon_plugin.muon.pieces.Router._refusal", lambda *_: "")
    results = run_ranks(2, run_job, job)
    assert {piece.way for piece in job.plan(2).pieces} == {Way.gram}
    assert max(job.errors(results).values()) < 1e-6, job.errors(results)


def test_owners_share_the_work() -> None:
    weights = {f"w{i}": ((64, 64 + 16 * (i % 4)), plain_matrix(64, 64 + 16 * (i % 4)), (), 0) for i in range(17)}
    weights = {name: (shape, view, shape, 0) for name, (shape, view, _, _) in weights.items()}
    owned, gathered = (job_of(mode, weights=weights).plan(4) for mode in (OWNER, DUPLICATED))
    work = [sum(owned.flops_of(stage, index) for stage in owned.stages) for index in range(4)]
    assert sum(work) == gathered.flops
    assert max(work) / (sum(work) / 4) < 4 / 3
    assert owned.flops == max(work)
    assert owned.received_bytes < gathered.received_bytes
    spread = job_of(OWNER, weights=weights, max_stage_bytes=1).plan(4)
    assert len(spread.stages) == 17  # each owner waits for the others, but not always the same one works
    assert {stage.owners for stage in spread.stages} == {(0,), (1,), (2,), (3,)}


def test_stages_bound_the_buffers_of_owners() -> None:
    weights = {f"w{i}": ((48, 48), plain_matrix(48, 48), (48, 48), 0) for i in range(16)}
    small, large = (
        run_ranks(2, run_job, job_of(OWNER, weights=weights, max_stage_bytes=limit))[0].workspace_bytes
        for limit in (4 * 4 * 48 * 48, 256 << 20)
    )
    assert small < 0.4 * large


def test_blockwise_is_the_polar_factor_of_each_slice_and_sends_nothing() -> None:
    weights = {"w": ((16, 48), plain_matrix(16, 48), (16, 48), 1)}
    job = job_of(BLOCKWISE, weights=weights, missing=(frozenset(),))
    results = run_ranks(2, run_job, job)
    assert [result.received for result in results] == [0, 0]
    (stage,) = job.plan(2).stages
    assert stage.way is Way.blockwise
    coefficients = job.plan(2).coefficients
    slices = job.values("w", 1).chunk(2, dim=1)
    # the scale is that of the slice, as in Megatron: 0.2 sqrt(max(16, 24))
    update = torch.cat([0.2 * 24**0.5 * reference_newton_schulz(piece, coefficients) for piece in slices], dim=1)
    wanted = job.values("w", 0).double() * (1 - 0.1 * 0.1) - 0.1 * update
    torch.testing.assert_close(job.whole("w", results).double(), wanted, rtol=1e-5, atol=1e-5)


def test_blockwise_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    blockwise._warn.cache_clear()
    for mode in (BLOCKWISE, BLOCKWISE, OWNER):
        for size in (1, 2):
            (spec,) = Job(HpMuon(), weights={"w": WEIGHTS["row, wide"]}).specs(size)
            param = torch.nn.Parameter(torch.zeros(spec.local_numel))
            HpMuonOptimizer([{"params": [param], "algorithm": "muon"}], {param: spec}, HpMuon(tp_mode=mode))
    assert [record.message for record in caplog.records if "blockwise" in record.message] == [
        "tp_mode=blockwise orthogonalises every tensor-parallel rank's slice by itself: the update is not Muon's, "
        "and changes with the number of ranks"
    ]
