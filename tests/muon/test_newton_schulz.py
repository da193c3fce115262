import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hp_muon_plugin.config.choices import FloatDtype, NonFinite, Schedule
from hp_muon_plugin.errors import GradientError
from hp_muon_plugin.muon.algorithm import Algorithm, Form, choose
from hp_muon_plugin.muon.coefficients import SCHEDULES, resolve_schedule
from hp_muon_plugin.muon.newton_schulz import NewtonSchulz, Stack, Target, orthogonalize
from hp_muon_plugin.muon.reference import reference_newton_schulz
from hp_muon_plugin.muon.workspace import Workspace
from muon.ns_inputs import errors, gaussian, judged_matrices, standard_float32, torch_muon

CPU = torch.device("cpu")
KELLER = resolve_schedule(Schedule.keller)
NAMED = [schedule for schedule in Schedule if schedule is not Schedule.custom]
SHAPES = [(24, 512), (512, 24), (64, 64), (96, 160), (160, 96), (256, 256), (5, 7)]
ALGORITHMS = [
    Algorithm(Form.gram),
    Algorithm(Form.standard),
    Algorithm(Form.gram, 4),
    Algorithm(Form.standard, 3),
]


def engine(algorithm: Algorithm = ALGORITHMS[0], schedule: Schedule = Schedule.keller, **options: Any) -> NewtonSchulz:
    return NewtonSchulz(resolve_schedule(schedule), algorithm, device=CPU, **options)


def polar(x: torch.Tensor, algorithm: Algorithm = ALGORITHMS[0], schedule: Schedule = Schedule.keller) -> torch.Tensor:
    return orthogonalize(x, engine(algorithm, schedule))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, None], ids=str)
def test_float32_accuracy_of_five_step_schedules(shape: tuple[int, int], algorithm: Algorithm | None) -> None:
    """Bars: 5e-5 on Gaussians, 1.5e-3 (Frobenius) and 5e-3 (spectral) on everything else."""
    if min(shape) < 12:
        algorithm = None  # where a bad direction weighs more, the table never takes the Gram form
    algorithm = algorithm or choose("cpu", min(shape), max(shape))
    for schedule in (Schedule.keller, Schedule.you, Schedule.polar_express, Schedule.cubic):
        coefficients = resolve_schedule(schedule)
        for name, x in judged_matrices(*shape).items():
            frobenius, spectral = errors(polar(x, algorithm, schedule), x, coefficients)
            assert frobenius < (5e-5 if name == "gaussian" else 1.5e-3), (schedule, name, frobenius)
            assert spectral < 5e-3, (schedule, name, spectral)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("schedule", [Schedule.deepseek_v4, Schedule.cans])
def test_longer_and_steeper_schedules_stay_near_the_standard_iteration(
    shape: tuple[int, int], schedule: Schedule
) -> None:
    """At most 6 times the plain float32 iteration's own error (which is large on rank-1 input), or 1e-4."""
    coefficients = resolve_schedule(schedule)
    algorithm = choose("cpu", min(shape), max(shape))
    for name, x in judged_matrices(*shape).items():
        ours, _ = errors(polar(x, algorithm, schedule), x, coefficients)
        plain, _ = errors(standard_float32(x, coefficients), x, coefficients)
        assert ours < max(6 * plain, 1.5e-3), (name, ours, plain)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_never_worse_than_torch_muon(shape: tuple[int, int]) -> None:
    algorithm = choose("cpu", min(shape), max(shape))
    for name, x in judged_matrices(*shape).items():
        ours, theirs = (errors(result, x, KELLER) for result in (polar(x, algorithm), torch_muon(x)))
        assert ours[0] <= theirs[0], (name, ours, theirs)
        assert ours[1] <= theirs[1], (name, ours, theirs)


@pytest.mark.parametrize("shape", [(24, 512), (96, 160), (160, 96), (64, 64)], ids=str)
def test_bfloat16_in_and_out_is_rounded_once(shape: tuple[int, int]) -> None:
    for name, x in judged_matrices(*shape).items():
        if name.startswith(("rank", "cond1e8")):
            continue
        half = x.bfloat16()
        got = polar(half, choose("cpu", min(shape), max(shape)))
        assert got.dtype is torch.bfloat16
        assert errors(got.float(), half.float(), KELLER)[0] < 2.5e-3, name


@pytest.mark.parametrize("dtype", [FloatDtype.float16, FloatDtype.bfloat16])
@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("shape", [(24, 512), (96, 160), (64, 64)], ids=str)
def test_half_precision_forms(dtype: FloatDtype, form: Form, shape: tuple[int, int]) -> None:
    """For accelerators, here in emulation: no explosion, and the accuracy that the type allows."""
    algorithm = Algorithm(form, dtype=dtype)
    unit = algorithm.precision.unit
    for name, x in judged_matrices(*shape).items():
        for factor in (1.0, 1e-12, 1e12):
            got = polar(x * factor, algorithm)
            assert got.dtype is torch.float32
            frobenius, _ = errors(got, x, KELLER)
            theirs, _ = errors(torch_muon(x), x, KELLER)
            if name == "gaussian":
                assert frobenius < 16 * unit, (name, frobenius)
            else:
                assert frobenius < max(2.5 * theirs * unit / 2**-8, 60 * unit), (name, frobenius, theirs)


@pytest.mark.parametrize("exponent", [-45, -38, -30, -20, -10, 0, 10, 19, 30, 38])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_the_result_does_not_depend_on_the_size_of_the_gradient(exponent: int, algorithm: Algorithm) -> None:
    """Emerging-Optimizers #229: a gradient of norm 1e-10 came out 25 times too small, 1e-20 as zero."""
    scale = 2.0 ** round(exponent * 3.3219)
    x = torch.eye(8) * scale
    assert 0 < float(x.max()) < math.inf
    torch.testing.assert_close(polar(x, algorithm), polar(torch.eye(8), algorithm), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("factor", [1e-25, 1e-12, 1e12, 1e19, 1e25, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_and_tiny_matrices_are_as_exact_as_others(factor: float, dtype: torch.dtype) -> None:
    x = (gaussian(3, 16, 48) * torch.tensor([1.0, factor, 1.0])[:, None, None]).to(dtype)
    got = polar(x)
    for matrix, result in zip(x, got, strict=True):
        limit = 5e-5 if dtype is torch.float32 else 2.5e-3
        assert errors(result.float(), matrix.float().double(), KELLER)[0] < limit


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_zero_gives_zero_and_leaves_its_neighbours_alone(algorithm: Algorithm) -> None:
    """Emerging-Optimizers PR 254: 0/0 became NaN."""
    x = gaussian(3, 6, 10)
    alone = polar(x, algorithm)
    x[1] = 0
    got = polar(x, algorithm)
    assert torch.equal(got[1], torch.zeros(6, 10))
    torch.testing.assert_close(got[[0, 2]], alone[[0, 2]], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("schedule", [Schedule.keller, Schedule.polar_express, Schedule.deepseek_v4])
@pytest.mark.parametrize("dtype", [FloatDtype.float16, FloatDtype.bfloat16])
@pytest.mark.parametrize("form", Form)
def test_zero_gives_zero_in_half_precision(form: Form, dtype: FloatDtype, schedule: Schedule) -> None:
    """float16, which accelerators take for large matrices, gave NaN: factors of 1e19 are infinite in it."""
    x = gaussian(3, 16, 40)
    alone = polar(x, Algorithm(form, dtype=dtype), schedule)
    x[1] = 0
    got = polar(x, Algorithm(form, dtype=dtype), schedule)
    assert torch.equal(got[1], torch.zeros(16, 40))
    torch.testing.assert_close(got[[0, 2]], alone[[0, 2]], rtol=1e-6, atol=1e-7)


def test_empty_batches_and_empty_sides_give_empty() -> None:
    assert polar(torch.zeros(0, 4, 6)).shape == (0, 4, 6)
    assert polar(torch.zeros(3, 0, 6)).shape == (3, 0, 6)
    engine()([])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_a_bad_entry_stays_in_its_own_matrix(bad: float, algorithm: Algorithm) -> None:
    """dion #76: one NaN spread through a fused batch."""
    x = gaussian(3, 6, 10)
    alone = polar(x, algorithm)
    x[1, 2, 3] = bad
    got = polar(x, algorithm)
    assert not torch.isfinite(got[1]).any()
    torch.testing.assert_close(got[[0, 2]], alone[[0, 2]], rtol=1e-6, atol=1e-7)


def test_one_row_and_one_column_are_scaled_by_the_scalar_polynomial() -> None:
    row = gaussian(1, 1, 50)
    value = 1.0
    for a, b, c in KELLER:
        value = a * value + b * value**3 + c * value**5
    torch.testing.assert_close(polar(row), value * row / row.norm(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(polar(row.mT), value * row.mT / row.norm(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(polar(torch.tensor([[-3.0]])), torch.tensor([[-value]]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_the_input_is_never_changed(dtype: torch.dtype, algorithm: Algorithm) -> None:
    x = gaussian(2, 8, 12).to(dtype)
    before = x.clone()
    polar(x, algorithm)
    assert torch.equal(x, before)


def strided_views() -> dict[str, torch.Tensor]:
    return {
        "transposed": gaussian(48, 16).mT,
        "every second row": gaussian(32, 48)[::2],
        "inner columns": gaussian(16, 60)[:, 5:53],
        "batch of columns": gaussian(16, 3, 48).transpose(0, 1),
        "expanded rows": gaussian(1, 48).expand(16, 48),
        "permuted stack": gaussian(48, 3, 16).permute(1, 2, 0),
    }


@pytest.mark.parametrize("name", list(strided_views()))
def test_strided_views_are_read_and_written_in_place(name: str) -> None:
    x = strided_views()[name]
    wanted = polar(x.contiguous())
    torch.testing.assert_close(polar(x), wanted, rtol=2e-5, atol=2e-6)
    if name != "expanded rows":
        out = torch.empty_strided(x.shape, x.stride())
        orthogonalize(x, engine(), out=out)
        torch.testing.assert_close(out, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
@pytest.mark.parametrize("shape", [(24, 1024), (1024, 24), (100, 130), (128, 128), (40, 10000)], ids=str)
def test_a_matrix_does_not_depend_on_its_batch_mates(
    threads: int, algorithm: Algorithm, shape: tuple[int, int]
) -> None:
    """Bit for bit on the CPU: alone, in a stack, in a list, in chunks, beside other long sides."""
    torch.set_num_threads(threads)
    try:
        x = gaussian(5, *shape)
        alone = torch.stack([polar(matrix, algorithm) for matrix in x])
        assert torch.equal(polar(x, algorithm), alone)
        out = torch.empty_like(x)
        mates = gaussian(2, min(shape), 77 + max(shape), seed=9)
        parts = [Stack(x[i : i + 1], (Target(out[i : i + 1], 0, 1),)) for i in range(5)]
        engine(algorithm)([Stack(mates, (Target(torch.empty_like(mates), 0, 2),)), *parts])
        assert torch.equal(out, alone)
        small = NewtonSchulz(KELLER, algorithm, device=CPU, max_workspace_bytes=16 * min(shape) ** 2 * 2)
        assert torch.equal(orthogonalize(x, small), alone)
    finally:
        torch.set_num_threads(1)


def test_mixed_long_sides_wide_and_tall_share_one_batch() -> None:
    xs = [gaussian(2, 16, 40), gaussian(16, 100)[None], gaussian(3, 70, 16), gaussian(1, 16, 16)]
    outs = [torch.empty_like(x) for x in xs]
    engine()([Stack(x, (Target(out, 0, x.shape[0]),)) for x, out in zip(xs, outs, strict=True)])
    for x, out in zip(xs, outs, strict=True):
        for matrix, result in zip(x, out, strict=True):
            assert errors(result, matrix, KELLER)[0] < 5e-5


@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (24, 24)], ids=str)
def test_the_update_is_fused_into_the_last_product(shape: tuple[int, int]) -> None:
    x, weight = gaussian(4, *shape), gaussian(4, *shape, seed=1)
    wanted = 0.9 * weight - 0.1 * polar(x)
    engine()([Stack(x, (Target(weight, 0, 4, keep=0.9, scale=-0.1),))])
    torch.testing.assert_close(weight, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(24, 64), (64, 24)], ids=str)
def test_rows_in_blocks_apart_are_one_matrix(shape: tuple[int, int]) -> None:
    """The query rows of a fused QKV: groups of rows with the keys and values between them."""
    x = gaussian(*shape)
    blocks = 4
    storage = torch.full((blocks, 2, shape[0] // blocks, shape[1]), 7.0)
    engine()([Stack(x[None], (Target(storage[:, 0], 0, 1),))])
    torch.testing.assert_close(storage[:, 0].reshape(shape), polar(x), rtol=1e-5, atol=1e-6)
    assert torch.equal(storage[:, 1], torch.full_like(storage[:, 1], 7.0))


def test_targets_of_one_stack_may_lie_apart() -> None:
    x = gaussian(5, 6, 9)
    first, second = torch.empty(2, 6, 9), torch.empty(3, 6, 9)
    targets = (Target(second, 2, 3), Target(first, 0, 2))
    NewtonSchulz(KELLER, ALGORITHMS[0], device=CPU, max_workspace_bytes=16 * 36 * 2)([Stack(x, targets)])
    assert torch.equal(torch.cat([first, second]), polar(x))


def test_overwriting_ignores_what_was_there() -> None:
    out = torch.full((6, 9), math.nan)
    orthogonalize(gaussian(6, 9), engine(), out=out)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("always_scales", [True, False])
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, Algorithm(Form.gram, dtype=FloatDtype.bfloat16)], ids=str)
def test_bad_matrices_are_skipped_and_counted(algorithm: Algorithm, always_scales: bool) -> None:
    x, weight = gaussian(4, 6, 10), gaussian(4, 6, 10, seed=1)
    x[1, 2, 3], x[3, 0, 0] = math.nan, math.inf
    before = x.clone()
    iteration = engine(algorithm, non_finite=NonFinite.skip, always_scales=always_scales)
    wanted = 0.9 * weight
    wanted[[0, 2]] -= 0.1 * orthogonalize(x[[0, 2]], engine(algorithm))
    iteration([Stack(x, (Target(weight, 0, 4, keep=0.9, scale=-0.1),))])
    tolerance = 1e-5 if algorithm.dtype is FloatDtype.float32 else 2e-3
    torch.testing.assert_close(weight, wanted, rtol=tolerance, atol=tolerance)
    assert iteration.num_non_finite == 2
    assert torch.equal(x.nan_to_num(), before.nan_to_num())


def test_bad_matrices_are_an_error_before_anything_is_written() -> None:
    x, weight = gaussian(9, 6, 10), gaussian(9, 6, 10, seed=1)
    x[7, 2, 3] = math.nan
    before = weight.clone()
    iteration = engine(non_finite=NonFinite.error, max_workspace_bytes=16 * 36 * 2)
    with pytest.raises(GradientError, match=r"matrices \[7\] of 9: NaN or infinite entry \(non_finite=error\)"):
        iteration([Stack(x, (Target(weight, 0, 9, keep=0.9, scale=-0.1),))])
    assert torch.equal(weight, before)
    x[7, 2, 3] = 0
    iteration([Stack(x, (Target(weight, 0, 9),))])
    torch.testing.assert_close(weight, polar(x))


@pytest.mark.parametrize("exponent", [-120, -60, 0, 60, 120])
def test_scaling_without_a_look_at_the_sums_gives_the_same(exponent: int) -> None:
    """What accelerators do, where a look would stop the host."""
    x = gaussian(3, 16, 40)
    got = orthogonalize(x * 2.0**exponent, engine(always_scales=True))
    torch.testing.assert_close(got, polar(x), rtol=1e-5, atol=1e-6)
    scratch = x * 2.0**exponent
    engine(always_scales=True)([Stack(scratch, (Target(got, 0, 3),), is_scratch=True)])
    torch.testing.assert_close(got, polar(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_smaller_matrices_join_a_batch_padded_with_zeros(algorithm: Algorithm) -> None:
    xs = [gaussian(2, 30, 70), gaussian(3, 24, 500), gaussian(1, 90, 17), gaussian(1, 1, 50)]
    xs[1][1, 3, 3] = math.nan
    outs = [torch.empty_like(x) for x in xs]
    iteration = engine(algorithm)
    for _ in range(2):  # a second time, when the padding holds what the first left there
        iteration([Stack(x, (Target(out, 0, x.shape[0]),)) for x, out in zip(xs, outs, strict=True)])
        for x, out in zip(xs, outs, strict=True):
            for matrix, result in zip(x, out, strict=True):
                if torch.isfinite(matrix).all():
                    assert errors(result, matrix, KELLER)[0] < 5e-5
                else:
                    assert torch.isnan(result).all()


class Counter(TorchDispatchMode):
    """Counts kernels: every dispatched operation that is not a view."""

    VIEWS = ("view", "slice", "select", "diagonal", "transpose", "expand", "unsqueeze", "alias", "split", "detach")

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func._overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        if not name.startswith(self.VIEWS) and name not in (
            "permute",
            "unfold",
            "t",
            "as_strided",
            "_local_scalar_dense",
        ):
            self.kernels.append(name)
        return result


@pytest.mark.parametrize("count", [1, 74, 1000])
@pytest.mark.parametrize("algorithm", ALGORITHMS[:2], ids=str)
def test_kernels_per_group_do_not_grow_with_the_group(count: int, algorithm: Algorithm) -> None:
    x, weight = gaussian(count, 24, 64), gaussian(count, 24, 64)
    iteration = NewtonSchulz(KELLER, algorithm, device=CPU, max_workspace_bytes=1 << 30)
    stacks = [Stack(x, (Target(weight, 0, count, keep=0.9, scale=-0.1),))]
    iteration(stacks)
    with Counter() as counter:
        iteration(stacks)
    assert len(counter.kernels) <= 35, counter.kernels
    on_device = engine(algorithm, always_scales=True, max_workspace_bytes=1 << 30)
    on_device(stacks)
    with Counter() as counter:
        on_device(stacks)
    assert len(counter.kernels) <= 35, counter.kernels


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
@pytest.mark.parametrize("schedule", [Schedule.keller, Schedule.deepseek_v4])
@pytest.mark.parametrize("shape", [(24, 300), (300, 24), (128, 128)], ids=str)
def test_a_steady_step_allocates_nothing(algorithm: Algorithm, schedule: Schedule, shape: tuple[int, int]) -> None:
    from torch.profiler import ProfilerActivity, profile

    x, weight = gaussian(6, *shape), gaussian(6, *shape)
    iteration = engine(algorithm, schedule)
    stacks = [Stack(x, (Target(weight, 0, 6, keep=0.9, scale=-0.1),))]
    iteration(stacks)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        iteration(stacks)
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in record.key_averages())
    # reading the range of the traces gives two numbers, 8 bytes
    assert allocated <= 8 * 6, [(e.key, e.self_cpu_memory_usage) for e in record.key_averages()]


def test_the_workspace_of_a_chunk_is_four_small_matrices() -> None:
    workspace = Workspace(CPU)
    x = gaussian(50, 32, 2000)
    limit = 16 * 7 * 32 * 32
    iteration = NewtonSchulz(KELLER, ALGORITHMS[0], device=CPU, workspace=workspace, max_workspace_bytes=limit)
    orthogonalize(x, iteration)
    assert workspace.nbytes <= limit + 2 * 4 * 7


def test_runs_follow_from_the_precision() -> None:
    """The derived restarts are the ones that peers tuned by hand (reference: section 1.4 of the research page)."""

    def lengths(schedule: Schedule, dtype: FloatDtype) -> tuple[int, ...]:
        return Algorithm(Form.gram, dtype=dtype).run_lengths(resolve_schedule(schedule))

    assert lengths(Schedule.keller, FloatDtype.float32) == (5,)
    assert lengths(Schedule.you, FloatDtype.float32) == (5,)
    assert lengths(Schedule.polar_express, FloatDtype.float32) == (4, 1)
    assert lengths(Schedule.deepseek_v4, FloatDtype.float32) == (5, 5)
    assert lengths(Schedule.keller, FloatDtype.float16) == (2, 2, 1)
    assert lengths(Schedule.polar_express, FloatDtype.float16) == (1, 2, 2)
    assert lengths(Schedule.you, FloatDtype.float16) == (2, 3)
    assert Algorithm(Form.standard).run_lengths(KELLER) == (1,) * 5


def test_without_the_derived_runs_long_schedules_explode() -> None:
    """The rule is needed: ten steps on one float32 Gram matrix give garbage on an ill-conditioned matrix."""
    x = judged_matrices(64, 256)["cond1e8"]
    coefficients = resolve_schedule(Schedule.deepseek_v4)
    iteration = engine(schedule=Schedule.deepseek_v4)
    naive = iteration.factor(iteration.gram([x[None]]), coefficients, is_first=True)[0] @ x
    assert errors(naive, x, coefficients)[0] > 1.0
    assert errors(polar(x, schedule=Schedule.deepseek_v4), x, coefficients)[0] < 0.02


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_reduced_float32_products_are_switched_off_inside(precision: str) -> None:
    """TF32, HF32 and oneDNN settings turn a float32 Gram matrix into one of 8 to 11 bits, silently."""
    x = judged_matrices(64, 256)["cond1e4"]
    wanted = polar(x)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        got = polar(x)
        still = torch.backends.mkldnn.matmul.fp32_precision
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(got, wanted)
    assert still == {"high": "tf32", "medium": "bf16"}[precision]


def test_reduced_precision_means_shorter_runs_where_it_cannot_be_switched_off() -> None:
    from hp_muon_plugin.muon.runs import TF32, segments

    assert [len(run) for run in segments(KELLER, TF32)] == [2, 2, 1]


@pytest.mark.parametrize("schedule", [Schedule.keller, Schedule.deepseek_v4])
@pytest.mark.parametrize("shards", [1, 2, 3, 7])
@pytest.mark.parametrize("is_tall", [False, True])
def test_gram_matrices_add_over_slices_of_the_long_side(schedule: Schedule, shards: int, is_tall: bool) -> None:
    """Ranks with slices of the long side all-reduce m*m numbers and apply Q to their own slice."""
    x = judged_matrices(16, 210)["cond1e4"]
    iteration = engine(schedule=schedule)
    slices = [piece.mT[None] if is_tall else piece[None] for piece in x.tensor_split(shards, dim=1)]
    for index, run in enumerate(iteration.runs):
        gram = torch.stack([iteration.gram([piece]) for piece in slices]).sum(0)  # what an all-reduce does
        q = iteration.factor(gram, run, is_first=index == 0).clone()
        slices = [piece @ q if is_tall else q @ piece for piece in slices]
    got = torch.cat([piece[0].mT if is_tall else piece[0] for piece in slices], dim=1)
    assert errors(got, x, resolve_schedule(schedule))[0] < 1.5e-3


@pytest.mark.parametrize("schedule", NAMED)
def test_every_schedule_brings_its_smallest_singular_value_to_the_band(schedule: Schedule) -> None:
    value = SCHEDULES[schedule].smallest * 1.05
    for a, b, c in resolve_schedule(schedule):
        value = a * value + b * value**3 + c * value**5
    assert 0.66 < value < 1.31


def test_singular_values_of_the_float32_result_lie_in_the_published_band() -> None:
    """Emerging-Optimizers PR 228: outliers beyond it were seen in bfloat16."""
    values = torch.linalg.svdvals(polar(gaussian(4, 32, 64)))
    assert float(values.min()) > 0.68
    assert float(values.max()) < 1.14


def test_flops_are_those_of_the_algorithm() -> None:
    m, n = 24, 10240
    assert Algorithm(Form.standard).flops(m, n, (1,) * 5) == 5 * (4 * m * m * n + 2 * m**3)
    assert Algorithm(Form.gram).flops(m, n, (5,)) == 4 * m * m * n + 34 * m**3
    assert Algorithm(Form.gram).flops(m, n, (2, 3)) == 8 * m * m * n + 28 * m**3


def test_the_table_prints_its_choice() -> None:
    assert str(choose("cpu", 24, 10240)) == "gram float32"
    assert str(choose("cpu", 2048, 2048)) == "standard float32, symmetric in 16 block rows"
    assert choose("xpu", 4096, 8192) == choose("cuda", 4096, 8192)


def test_reference_is_the_plain_iteration() -> None:
    x = gaussian(12, 30)
    assert errors(standard_float32(x, KELLER), x, KELLER)[0] < 1e-5
    assert replace(Algorithm(Form.gram), num_blocks=2) != Algorithm(Form.gram)
    assert reference_newton_schulz(torch.zeros(3, 4), KELLER).abs().max() == 0
