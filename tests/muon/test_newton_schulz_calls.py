"""How many calls and bytes the iteration needs for matrices that come in pieces."""

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hp_muon_plugin.config.choices import FloatDtype, Schedule
from hp_muon_plugin.muon.algorithm import TABLE, Algorithm, Form, choose, is_gathered
from hp_muon_plugin.muon.coefficients import resolve_schedule
from hp_muon_plugin.muon.newton_schulz import NewtonSchulz, Stack, Target, orthogonalize
from hp_muon_plugin.muon.rule_file import load_table, save_table
from hp_muon_plugin.muon.workspace import Workspace
from muon.ns_inputs import gaussian

CPU = torch.device("cpu")
KELLER = resolve_schedule(Schedule.keller)
NO_KERNEL = ("view", "slice", "select", "diagonal", "transpose", "expand", "unsqueeze", "alias", "split", "permute")


class Calls(TorchDispatchMode):
    """Every dispatched operation that is not a view."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func._overloadpacket.__name__
        if not name.startswith((*NO_KERNEL, "_local_scalar_dense", "resolve_")):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def calls(engine: NewtonSchulz, stacks: list[Stack]) -> list[str]:
    """Calls of a steady step."""
    engine(stacks)
    with Calls() as seen:
        engine(stacks)
    return seen.names


def separate(count: int, rows: int, cols: int, **options: float) -> tuple[list[Stack], list[torch.Tensor]]:
    xs = [gaussian(1, rows, cols, seed=seed) for seed in range(count)]
    outs = [torch.ones(1, rows, cols) for _ in range(count)]
    return [Stack(x, (Target(out, 0, 1, **options),)) for x, out in zip(xs, outs, strict=True)], outs


def engine_for(rows: int, cols: int, **options: object) -> NewtonSchulz:
    return NewtonSchulz(KELLER, choose("cpu", min(rows, cols), max(rows, cols)), device=CPU, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(16, 16), (32, 40), (64, 64)], ids=str)
def test_separate_small_matrices_cost_as_many_calls_as_one_tensor(shape: tuple[int, int]) -> None:
    """64 matrices of 16 x 16 took twice as long as the stacked form: three products of its own for each."""
    counts = []
    for count in (4, 64):
        engine = engine_for(*shape, max_workspace_bytes=1 << 30)
        counts.append(len(calls(engine, separate(count, *shape)[0])))
    assert counts[0] == counts[1] <= 35
    update = calls(engine_for(*shape, max_workspace_bytes=1 << 30), separate(64, *shape, keep=0.9, scale=-0.1)[0])
    assert len(update) <= 35 + 64  # an update is still fused into the product of its own matrix


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(16, 16), (48, 64), (64, 48), (64, 64), (200, 200)], ids=str)
@pytest.mark.parametrize("options", [{}, {"scale": -0.3}, {"keep": 0.9, "scale": -0.1}], ids=str)
def test_gathered_matrices_are_what_they_are_alone(
    threads: int, shape: tuple[int, int], options: dict[str, float]
) -> None:
    """Bit for bit, views in other strides and another shape between them too."""
    torch.set_num_threads(threads)
    try:
        stacks, outs = separate(5, *shape, **options)
        view = gaussian(2, shape[1], shape[0], seed=70).mT
        target = torch.ones(2, *shape)
        stacks.insert(2, Stack(view, (Target(target, 0, 2, **options),)))
        stacks.insert(4, Stack(gaussian(1, min(shape), 333), (Target(torch.empty(1, min(shape), 333), 0, 1),)))
        engine_for(*shape)(stacks)
        for number, out in [(0, outs[0]), (1, outs[1]), (2, target), (3, outs[2]), (6, outs[4])]:
            alone = torch.ones_like(out)
            x = stacks[number].x
            for i in range(x.shape[0]):
                engine_for(*shape)([Stack(x[i : i + 1], (Target(alone[i : i + 1], 0, 1, **options),))])
            assert torch.equal(out, alone), number
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("shape", [(16, 16), (64, 64), (64, 96)], ids=str)
def test_gathering_allocates_nothing_and_stays_inside_the_workspace(shape: tuple[int, int]) -> None:
    from torch.profiler import ProfilerActivity, profile

    workspace = Workspace(CPU)
    engine = engine_for(*shape, workspace=workspace)
    stacks, _ = separate(12, *shape)
    engine(stacks)
    short, long = shape
    small = 4 * 12 * short * short
    most = 4 * small if short == long else 2 * small + 2 * 4 * 12 * short * long
    assert workspace.nbytes <= most + 2 * 4 * 12  # traces and their roots
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        engine(stacks)
    assert sum(max(0, event.self_cpu_memory_usage) for event in record.key_averages()) <= 8 * 6


def test_bad_and_huge_matrices_are_gathered_too() -> None:
    stacks, outs = separate(4, 32, 32)
    wanted = orthogonalize(torch.cat([stack.x for stack in stacks]), engine_for(32, 32))
    before = stacks[1].x.mul_(2.0**90).clone()
    stacks[2].x[0, 3, 4] = torch.nan
    engine_for(32, 32)(stacks)
    assert torch.equal(stacks[1].x, before)
    assert torch.isnan(outs[2]).all()
    for number in (0, 1, 3):
        torch.testing.assert_close(outs[number][0], wanted[number], rtol=1e-6, atol=1e-7)


def test_what_is_gathered_follows_from_copies_and_calls() -> None:
    assert is_gathered("cpu", 64, 64, num_threads=1)
    assert not is_gathered("cpu", 24, 10240, num_threads=1)
    assert not is_gathered("cpu", 24, 10240, num_threads=2)
    assert not is_gathered("cpu", 200, 200, num_threads=1)
    assert is_gathered("cpu", 200, 200, num_threads=2)  # threads that wait for each other cost more than the copy
    assert not is_gathered("cuda", 64, 64, num_threads=1)


def test_chunks_follow_the_number_of_threads() -> None:
    """The first call decided for all later ones, whatever the number of threads had become."""
    stacks, _ = separate(8, 128, 128)
    engine = engine_for(128, 128)
    found = []
    try:
        for threads in (2, 1, 2):
            torch.set_num_threads(threads)
            found.append(calls(engine, stacks).count("sum"))
    finally:
        torch.set_num_threads(1)
    assert found == [1, 2, 1]


def test_one_small_matrix_takes_few_calls() -> None:
    """Each costs a microsecond or two beside products of seven."""
    assert len(calls(engine_for(64, 64), separate(1, 64, 64)[0])) <= 25


@pytest.mark.parametrize("blocks", [4, 8, 16])
@pytest.mark.parametrize("form", list(Form))
def test_block_products_take_a_fixed_number_of_calls_per_chunk(form: Form, blocks: int) -> None:
    """More than 35: each product is one per block row, and mirrored. But not more for more matrices."""
    counts = set()
    for count in (1, 5):
        engine = NewtonSchulz(KELLER, Algorithm(form, blocks), device=CPU, max_workspace_bytes=1 << 30)
        x = gaussian(count, 64, 96)
        counts.add(len(calls(engine, [Stack(x, (Target(torch.empty_like(x), 0, count),))])))
    assert len(counts) == 1
    num_mirrored = 10 if form is Form.standard else 18
    assert counts.pop() <= num_mirrored * 5 * blocks + 20


@pytest.mark.parametrize("count", [1, 1000])
@pytest.mark.parametrize("dtype", [FloatDtype.float16, FloatDtype.float32])
@pytest.mark.parametrize("form", list(Form))
def test_devices_launch_at_most_35_kernels_per_group(form: Form, dtype: FloatDtype, count: int) -> None:
    """In every type; the symmetric kernel counts as the product that it replaces."""
    engine = NewtonSchulz(
        KELLER, Algorithm(form, dtype=dtype), device=CPU, always_scales=True, max_workspace_bytes=1 << 30
    )
    x, weight = gaussian(count, 24, 64), gaussian(count, 24, 64)
    names = calls(engine, [Stack(x, (Target(weight, 0, count, keep=0.9, scale=-0.1),))])
    assert len(names) <= 35, names


def test_threads_that_share_a_product_share_few_and_large_ones() -> None:
    """They meet at the end of each. The choice follows the number of threads from call to call."""
    engine, x = engine_for(256, 256), gaussian(1, 256, 256)
    out = torch.empty_like(x)
    stacks = [Stack(x, (Target(out, 0, 1),))]
    counts, results = [], []
    try:
        for threads in (1, 2, 1, 2):
            torch.set_num_threads(threads)
            counts.append(len(calls(engine, stacks)))
            results.append(out.clone())
    finally:
        torch.set_num_threads(1)
    assert counts[:2] == counts[2:]
    assert counts[1] <= 35 < counts[0]
    assert torch.equal(results[0], results[2])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-5)


def test_a_table_keeps_the_blocks_of_shared_products(tmp_path: Path) -> None:
    rules = [rule for rule in TABLE if rule.device == "cpu"]
    save_table(rules, tmp_path / "table.json", note="")
    assert list(load_table(tmp_path / "table.json"))[: len(rules)] == rules
    assert [choose("cpu", 300, 300).blocks(threads) for threads in (1, 2)] == [4, 1]
    assert [choose("cpu", 2048, 2048).blocks(threads) for threads in (1, 2)] == [16, 16]
