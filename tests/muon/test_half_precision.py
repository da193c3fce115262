"""bfloat16 products on the CPU, which oneDNN computes twice as fast as float32 where the processor has them."""

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hp_muon_plugin.config.choices import FloatDtype, NonFinite, Schedule
from hp_muon_plugin.muon.algorithm import TABLE, Algorithm, Form, Rule, choose
from hp_muon_plugin.muon.coefficients import resolve_schedule
from hp_muon_plugin.muon.newton_schulz import NewtonSchulz, Stack, Target, orthogonalize
from hp_muon_plugin.muon.rule_file import load_table, save_table
from hp_muon_plugin.muon.workspace import Workspace
from muon.ns_inputs import errors, gaussian, judged_matrices, torch_muon
from muon.test_newton_schulz_calls import calls as steady_calls

CPU = torch.device("cpu")
KELLER = resolve_schedule(Schedule.keller)
BF16 = FloatDtype.bfloat16
BLOCKS = [Algorithm(form, blocks, BF16) for form in Form for blocks in (1, 3, 16)]


def engine(algorithm: Algorithm, **options: object) -> NewtonSchulz:
    return NewtonSchulz(KELLER, algorithm, device=CPU, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(96, 160), (160, 96), (64, 64), (70, 300), (300, 70)], ids=str)
@pytest.mark.parametrize("algorithm", BLOCKS, ids=str)
def test_block_products_are_as_accurate_as_full_ones(algorithm: Algorithm, shape: tuple[int, int]) -> None:
    """What torch.optim.Muon, which works in bfloat16 too, is off by is the measure: it varies with the input."""
    for name, x in judged_matrices(*shape).items():
        frobenius, spectral = errors(orthogonalize(x, engine(algorithm)), x, KELLER)
        theirs = errors(torch_muon(x), x, KELLER)
        assert frobenius < 2.5 * theirs[0], (name, frobenius, theirs)
        assert spectral < 3 * theirs[1], (name, spectral, theirs)


@pytest.mark.parametrize("factor", [1e-30, 1e-19, 1e12, 1e19, 1e30])
@pytest.mark.parametrize("shape", [(60, 90), (90, 60)], ids=str)
@pytest.mark.parametrize("algorithm", [BLOCKS[1], BLOCKS[4]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_size_of_entries(algorithm: Algorithm, shape: tuple[int, int], factor: float, dtype: torch.dtype) -> None:
    """bfloat16 has the range of float32: what is scaled, and only then, is a matrix whose squares leave it."""
    x = (gaussian(3, *shape) * torch.tensor([1.0, factor, 1.0])[:, None, None]).to(dtype)
    before = x.clone()
    got = orthogonalize(x, engine(algorithm))
    assert torch.equal(x, before)
    assert got.dtype is dtype
    for matrix, result in zip(x, got, strict=True):
        assert errors(result.float(), matrix.double(), KELLER)[0] < 4e-2


@pytest.mark.parametrize("shape", [(60, 90), (90, 60), (64, 64)], ids=str)
@pytest.mark.parametrize("algorithm", BLOCKS, ids=str)
def test_targets_of_every_kind(algorithm: Algorithm, shape: tuple[int, int]) -> None:
    """Overwritten, updated, scaled, in blocks of rows with gaps, in parts; tall ones are worked on as wide ones."""
    x = gaussian(4, *shape)
    wanted = orthogonalize(x, engine(algorithm))
    assert errors(wanted[0], x[0], KELLER)[0] < 4e-2
    weight = gaussian(4, *shape, seed=5)
    updated = weight.clone()
    parts = (Target(updated[2:], 2, 2, keep=0.9, scale=-0.5), Target(updated[:2], 0, 2, keep=0.9, scale=-0.5))
    engine(algorithm)([Stack(x, parts)])
    torch.testing.assert_close(updated, 0.9 * weight - 0.5 * wanted, rtol=0, atol=4e-3)
    storage = torch.full((5, 2, shape[0] // 5, shape[1]), 7.0) if shape[0] % 5 == 0 else None
    if storage is not None:
        engine(algorithm)([Stack(x[1:2], (Target(storage[:, 0], 0, 1),))])
        assert torch.equal(storage[:, 0].reshape(shape), wanted[1])
        assert torch.equal(storage[:, 1], torch.full_like(storage[:, 1], 7.0))


@pytest.mark.parametrize("algorithm", BLOCKS, ids=str)
def test_company_does_not_matter(algorithm: Algorithm) -> None:
    """Bit for bit; wide, tall, another long side, and a matrix with a NaN beside it."""
    xs = [gaussian(2, 48, 80), gaussian(3, 80, 48, seed=1), gaussian(1, 48, 333, seed=2), gaussian(1, 48, 48, seed=3)]
    xs[1][1, 3, 3] = math.nan
    outs = [torch.empty_like(x) for x in xs]
    together = engine(algorithm, non_finite=NonFinite.skip)
    for _ in range(2):
        together([Stack(x, (Target(out, 0, x.shape[0]),)) for x, out in zip(xs, outs, strict=True)])
    for x, out in zip(xs, outs, strict=True):
        for matrix, result in zip(x, out, strict=True):
            if torch.isfinite(matrix).all():
                assert torch.equal(result, orthogonalize(matrix, engine(algorithm)))
            else:
                assert not result.any()
    assert together.num_non_finite == 2


def _calls(shape: tuple[int, ...], algorithm: Algorithm) -> tuple[Counter[str], int]:
    """Operations of a steady step by name, also those that others call, and bytes allocated."""
    x = gaussian(*shape)
    out = torch.empty_like(x)
    iteration = engine(algorithm)
    stacks = [Stack(x, (Target(out, 0, x.shape[0]),))]
    iteration(stacks)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        iteration(stacks)
    averages = record.key_averages()
    return Counter({event.key: event.count for event in averages}), sum(
        max(0, event.self_cpu_memory_usage) for event in averages
    )


@pytest.mark.parametrize("shape", [(2, 64, 160), (2, 160, 64), (1, 64, 64)], ids=str)
@pytest.mark.parametrize("algorithm", BLOCKS, ids=str)
def test_no_operand_is_copied_for_a_product(algorithm: Algorithm, shape: tuple[int, ...]) -> None:
    """torch makes operands contiguous that are neither that nor a transpose: for a column block, a product's price."""
    calls, allocated = _calls(shape, algorithm)
    assert calls["aten::clone"] == calls["aten::contiguous"] == 0
    assert calls["aten::mm"] + calls["aten::addmm"] + calls["aten::bmm"] + calls["aten::baddbmm"] > 10
    assert allocated <= shape[0] * 4 * (min(shape[1:]) + 8)  # a diagonal in float32 to sum, and single numbers


@pytest.mark.parametrize("count", [1, 1000])
@pytest.mark.parametrize("form", list(Form))
def test_a_batch_takes_at_most_35_calls(form: Form, count: int) -> None:
    x, weight = gaussian(count, 24, 64), gaussian(count, 24, 64)
    stacks = [Stack(x, (Target(weight, 0, count, keep=0.9, scale=-0.1),))]
    iteration = engine(Algorithm(form, dtype=BF16), max_workspace_bytes=1 << 30)
    assert len(steady_calls(iteration, stacks)) <= 35


def test_buffers_are_bounded() -> None:
    workspace = Workspace(CPU)
    x = gaussian(3, 128, 256)
    iteration = engine(Algorithm(Form.gram, 4, BF16), workspace=workspace)
    iteration([Stack(x, (Target(torch.empty_like(x), 0, 3),))])
    small, large = 3 * 128**2 * 2, 3 * 128 * 256 * 2
    widened = 2 * small
    mirror, traces = 32 * 32 * 2, 2 * 3 * 4
    assert workspace.nbytes == 4 * small + widened + 4 * large + mirror + traces  # copy, two between runs, last product


def test_a_type_that_is_asked_for_has_rows_of_its_own() -> None:
    """Block rows that were measured in float32 made bfloat16 slower than the plain iteration."""
    assert choose("cpu", 300, 640).dtype is FloatDtype.float32
    # Below 39 and for long rows float32 is measured to be as fast or faster, and it is a thousand times as accurate.
    shapes = {(6, 90): False, (24, 10240): False, (24, 24): False, (128, 2048): False, (256, 4096): False}
    shapes |= {(224, 640): True, (640, 2304): True, (2048, 2048): True, (128, 1024): True}
    for (short, long), is_half in shapes.items():
        found = choose("cpu", short, long, dtype=BF16)
        assert found.dtype is (BF16 if is_half else FloatDtype.float32)
        assert found is next(r.algorithm for r in TABLE if r.asked is BF16 and r.fits("cpu", short, long))
        assert choose("cpu", short, long, dtype=FloatDtype.float32) == choose("cpu", short, long)
        emulated = choose("cpu", short, long, dtype=FloatDtype.float16)
        assert (emulated.dtype, emulated.num_blocks) == (FloatDtype.float16, 1)
    kernel = choose("cuda", 1024, 4096)
    assert choose("cuda", 1024, 4096, dtype=BF16) == Algorithm(kernel.form, dtype=BF16, has_kernel=kernel.has_kernel)


def test_measured_rows_of_a_type_come_before_the_built_in_ones(tmp_path: Path) -> None:
    rule = Rule("cpu", 1 << 62, 1.0, Algorithm(Form.standard, 2, BF16), BF16)
    save_table([rule], tmp_path / "table.json", note="here")
    table = load_table(tmp_path / "table.json")
    assert table[0] == rule
    assert choose("cpu", 224, 640, table=table, dtype=BF16) is table[0].algorithm
    assert choose("cpu", 224, 640, table=table) == choose("cpu", 224, 640)
