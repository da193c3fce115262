"""The wire on gloo: whole numbers, so that sums are exact in any order and equal to a float64 sum."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from hp_muon_plugin.platform import wire as wire_module
from hp_muon_plugin.platform.collectives import AxisGroup
from hp_muon_plugin.platform.kinds import Collective
from hp_muon_plugin.platform.wire import C10dWire
from tests.dist_pool import joined, run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32)
LENGTHS = (1, 7, 64, 1001)
WORLDS = (1, 2, 3, 4)


def whole_numbers(numel, rank, dtype=torch.float32, seed=0):
    """(numel,) of whole numbers in [-20, 20]: four of them sum exactly even in bf16."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-20, 21, (numel,), generator=generator).to(dtype)


def assert_same(actual, expected):
    # not torch.testing: its first use imports sympy, anew in every forked rank
    assert torch.equal(actual, expected), (actual, expected)


def summed(numel, world_size, seed=0):
    return sum(whole_numbers(numel, rank, torch.float64, seed) for rank in range(world_size))


def axis_of(launch):
    if launch.world_size == 1:
        return AxisGroup.single("shard")
    joined(launch)
    return AxisGroup.from_group("shard", dist.group.WORLD)


def run_on_every_case(launch):
    axis = axis_of(launch)
    wire = C10dWire()
    for check in CHECKS:
        for dtype in DTYPES:
            for n in LENGTHS:
                check(wire, axis, n, dtype)
    return True


def check_all_gather(wire, axis, n, dtype):
    expected = torch.cat([whole_numbers(n, rank, dtype) for rank in range(axis.size)])
    output = torch.empty(axis.size * n, dtype=dtype)
    wire.all_gather(output, whole_numbers(n, axis.index, dtype), axis).wait()
    assert_same(output, expected)


def check_all_to_all(wire, axis, n, dtype):
    """Rank r sends ``n * (r + d)`` numbers to rank d: uneven, and none from rank 0 to itself."""
    sent = [n * (axis.index + index) for index in range(axis.size)]
    mine = whole_numbers(sum(sent), axis.index, dtype)
    expected = []
    for rank in range(axis.size):
        lengths = [n * (rank + index) for index in range(axis.size)]
        first = sum(lengths[: axis.index])
        expected.append(whole_numbers(sum(lengths), rank, dtype)[first : first + lengths[axis.index]])
    output = torch.empty(sum(sent), dtype=dtype)
    wire.all_to_all(output, mine, sent, sent, axis).wait()
    assert_same(output, torch.cat(expected))


def check_all_gather_in_place(wire, axis, n, dtype):
    expected = torch.cat([whole_numbers(n, rank, dtype) for rank in range(axis.size)])
    output = torch.full((axis.size * n,), 99, dtype=dtype)
    source = output[axis.index * n :][:n]
    source.copy_(whole_numbers(n, axis.index, dtype))
    wire.all_gather(output, source, axis).wait()
    assert_same(output, expected)


def check_reduce_scatter(wire, axis, n, dtype):
    expected = summed(axis.size * n, axis.size)[axis.index * n :][:n].to(dtype)
    output = torch.empty(n, dtype=dtype)
    wire.reduce_scatter(output, whole_numbers(axis.size * n, axis.index, dtype), axis).wait()
    assert_same(output, expected)


def check_all_reduce(wire, axis, n, dtype):
    tensor = whole_numbers(n, axis.index, dtype)
    wire.all_reduce(tensor, axis).wait()
    assert_same(tensor, summed(n, axis.size).to(dtype))


def check_reduce(wire, axis, n, dtype):
    for owner in range(axis.size):
        tensor = whole_numbers(n, axis.index, dtype)
        wire.reduce(tensor, owner, axis).wait()
        if axis.index == owner:
            assert_same(tensor, summed(n, axis.size).to(dtype))


def check_broadcast(wire, axis, n, dtype):
    for owner in range(axis.size):
        tensor = whole_numbers(n, axis.index, dtype)
        wire.broadcast(tensor, owner, axis).wait()
        assert_same(tensor, whole_numbers(n, owner, dtype))


CHECKS = (
    check_all_gather,
    check_all_to_all,
    check_all_gather_in_place,
    check_reduce_scatter,
    check_all_reduce,
    check_reduce,
    check_broadcast,
)


@pytest.mark.parametrize("world_size", WORLDS)
def test_values_are_those_of_a_float64_sum(world_size):
    assert run_ranks(world_size, run_on_every_case) == [True] * world_size


def run_on_two_axes(launch):
    """Rows {0,1}, {2,3} and columns {0,2}, {1,3}: an owner's place is not its rank."""
    joined(launch)
    rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    row = AxisGroup.from_group("row", rows[launch.rank // 2])
    column = AxisGroup.from_group("column", columns[launch.rank % 2])
    members = {"row": [2 * (launch.rank // 2), 2 * (launch.rank // 2) + 1]}
    members["column"] = [launch.rank % 2, launch.rank % 2 + 2]
    wire = C10dWire()
    for axis in (row, column):
        ranks = members[axis.axis]
        for owner in range(2):
            tensor = whole_numbers(9, launch.rank)
            wire.broadcast(tensor, owner, axis).wait()
            assert_same(tensor, whole_numbers(9, ranks[owner]))
            tensor = whole_numbers(9, launch.rank)
            wire.reduce(tensor, owner, axis).wait()
            if axis.index == owner:
                assert_same(tensor, sum(whole_numbers(9, r) for r in ranks))
        gathered = torch.empty(18)
        wire.all_gather(gathered, whole_numbers(9, launch.rank), axis).wait()
        assert_same(gathered, torch.cat([whole_numbers(9, r) for r in ranks]))
        shard = torch.empty(9)
        wire.reduce_scatter(shard, whole_numbers(18, launch.rank), axis).wait()
        total = sum(whole_numbers(18, r) for r in ranks)
        assert_same(shard, total[9 * axis.index :][:9])
    return True


def test_owner_is_a_place_on_the_axis():
    assert run_ranks(4, run_on_two_axes) == [True] * 4


def run_many_in_flight(launch):
    axis = axis_of(launch)
    wire = C10dWire()
    for first_seed in (0, 6):  # the second time, scratch comes back: one call's must not serve another
        seeds = range(first_seed, first_seed + 6)
        outputs, gathered, handles = [], [], []
        for seed in seeds:
            outputs.append(torch.empty(33))
            gathered.append(torch.empty(33 * axis.size))
            source = whole_numbers(33 * axis.size, axis.index, seed=seed)
            handles.append(wire.reduce_scatter(outputs[-1], source, axis))
            handles.append(wire.all_gather(gathered[-1], whole_numbers(33, axis.index, seed=seed), axis))
        for handle in reversed(handles) if launch.rank % 2 else handles:  # ranks may wait in different orders
            handle.wait()
        for seed, output, whole in zip(seeds, outputs, gathered, strict=True):
            assert_same(output, summed(33 * axis.size, axis.size, seed)[33 * axis.index :][:33].float())
            assert_same(whole, torch.cat([whole_numbers(33, rank, seed=seed) for rank in range(axis.size)]))
    return True


def test_many_in_flight_keep_apart():
    assert run_ranks(3, run_many_in_flight) == [True] * 3


def run_waits_twice(launch):
    axis = axis_of(launch)
    output = torch.empty(5)
    handle = C10dWire().reduce_scatter(output, whole_numbers(10, axis.index), axis)
    handle.wait()
    output.zero_()
    handle.wait()  # a second sum would fill it again
    return output.abs().sum().item()


def test_wait_again_does_nothing():
    assert run_ranks(2, run_waits_twice) == [0.0, 0.0]


def run_drops_its_input(launch, kind):
    axis = axis_of(launch)
    source = whole_numbers(8, axis.index)
    wire = C10dWire()
    if kind == "reduce_scatter":
        handle = wire.reduce_scatter(torch.empty(4), source, axis)
    elif kind == "all_gather":
        handle = wire.all_gather(torch.empty(16), source, axis)
    else:
        handle = wire.all_reduce(source, axis)
    watch = weakref.ref(source)
    del source
    gc.collect()
    before = watch() is not None
    handle.wait()
    gc.collect()
    return before, watch() is not None


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather", "all_reduce"])
def test_handle_keeps_its_input_until_wait_and_no_longer(kind):
    assert run_ranks(2, run_drops_its_input, kind) == [(True, False)] * 2


def run_counts_scratch(launch):
    axis = axis_of(launch)
    wire = C10dWire()
    made = []
    allocate = torch.empty

    def recording(*arguments, **keywords):
        made.append(arguments)
        return allocate(*arguments, **keywords)

    wire_module.torch.empty = recording
    counts = []
    for _ in range(3):
        made.clear()
        handles = []
        for dtype in (torch.float32, torch.bfloat16):
            for _ in range(2):
                source = whole_numbers(16, axis.index, dtype)
                handles.append(wire.reduce_scatter(allocate(8, dtype=dtype), source, axis))
        for handle in handles:
            handle.wait()
        counts.append(len(made))
    return counts


def test_steady_state_allocates_no_scratch():
    # two in flight of each of two dtypes, and the fp32 partial sums of bf16
    assert run_ranks(2, run_counts_scratch) == [[5, 0, 0]] * 2


def run_bf16_rounds_once(launch):
    axis = axis_of(launch)
    numel = 4 * (wire_module.SUM_BLOCK + 5)  # more than a block
    every = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(4)]
    output = torch.empty(numel // 4, dtype=torch.bfloat16)
    C10dWire().reduce_scatter(output, every[axis.index].clone(), axis).wait()
    mine = [tensor.float()[axis.index * (numel // 4) :][: numel // 4] for tensor in every]
    once = (((mine[0] + mine[1]) + mine[2]) + mine[3]).bfloat16()
    return torch.equal(output, once)


def test_bf16_sum_is_rounded_once():
    assert run_ranks(4, run_bf16_rounds_once) == [True] * 4


@pytest.mark.parametrize("call", ["all_gather", "reduce_scatter", "all_reduce", "reduce", "broadcast"])
def test_empty_buffers_start_no_collective(call):
    arguments = {"all_reduce": (), "reduce": (1,), "broadcast": (1,)}.get(call, (torch.empty(0),))
    axis = AxisGroup("shard", 2, 0, "no group: c10d would raise")
    getattr(C10dWire(), call)(torch.empty(0), *arguments, axis).wait()
    full = {"all_gather": (torch.empty(2), torch.empty(1)), "reduce_scatter": (torch.empty(1), torch.empty(2))}
    with pytest.raises((TypeError, ValueError, AttributeError)):
        getattr(C10dWire(), call)(*full.get(call, (torch.empty(1), *arguments)), axis)


def run_half_failed(launch):
    axis = axis_of(launch)
    dist.barrier()  # both are connected before one of them leaves
    if launch.rank == 0:
        handle = C10dWire().reduce_scatter(torch.empty(4), torch.ones(8), axis)
        with pytest.raises(RuntimeError):
            handle.wait()
    return True


def test_missing_rank_ends_wait_with_an_error():
    assert run_ranks(2, run_half_failed, timeout_s=20.0) == [True, True]


@pytest.mark.parametrize("call", ["all_gather", "reduce_scatter"])
def test_lengths_that_do_not_fit_are_refused(call):
    axis = AxisGroup("shard", 2, 0, None)
    with pytest.raises(AssertionError, match="shard"):
        getattr(C10dWire(), call)(torch.empty(5), torch.empty(4), axis)


@pytest.mark.parametrize("call", ["reduce", "broadcast"])
def test_owner_outside_the_axis_is_refused(call):
    with pytest.raises(AssertionError, match="shard"):
        getattr(C10dWire(), call)(torch.empty(5), 1, AxisGroup.single("shard"))


def run_reads_versions(launch):
    axis = axis_of(launch)
    wire = C10dWire()
    gathered, shard = torch.zeros(8 * axis.size), torch.zeros(8)
    versions = gathered._version, shard._version
    wire.all_gather(gathered, torch.ones(8), axis).wait()
    wire.reduce_scatter(shard, torch.ones(8 * axis.size), axis).wait()
    assert gathered.sum() == 8 * axis.size, gathered
    assert shard.sum() == 8 * axis.size, shard
    return versions == (gathered._version, shard._version)


@pytest.mark.parametrize("world_size", [1, 2])
def test_version_counters_stay(world_size):
    """A weight gathered again for its backward pass must not look changed to autograd."""
    assert run_ranks(world_size, run_reads_versions) == [True] * world_size


def run_announced(launch):
    """Two models announce their calls together, and issue them in turn, with calls between that nobody announced."""
    axis = axis_of(launch)
    wires = (C10dWire(), C10dWire())
    sums, copies, announced = [], [], []
    for seed, wire in enumerate(wires):
        for n in LENGTHS:
            owner = n % axis.size
            sums.append((wire, whole_numbers(n, axis.index, seed=seed), owner, seed))
            copies.append((wire, whole_numbers(n, axis.index, seed=seed + 7), owner, seed + 7))
            announced.append(
                (
                    wire.expect(Collective.REDUCE, sums[-1][1], axis, owner_index=owner),
                    wire.expect(Collective.BROADCAST, copies[-1][1], axis, owner_index=owner),
                )
            )
    handles, totals = [], []
    for index in reversed(range(len(sums))):
        (wire, summand, owner, _), (_, copy, _, _), early = sums[index], copies[index], announced[index]
        totals.append((index, summand.clone()))
        handles.append(wire.broadcast(copy, owner, axis, expected=early[1]))
        handles.append(wire.reduce(totals[-1][1], owner, axis))
        handles.append(wire.reduce(summand, owner, axis, expected=early[0]))
    for handle in handles:
        handle.wait()
    for (_, summand, owner, seed), (_, copy, _, copied_seed) in zip(sums, copies, strict=True):
        if axis.index == owner:
            assert_same(summand.double(), summed(summand.numel(), axis.size, seed))
        assert_same(copy, whole_numbers(copy.numel(), owner, seed=copied_seed))
    for index, total in totals:
        if axis.index == sums[index][2]:
            assert_same(total.double(), summed(total.numel(), axis.size, sums[index][3]))
    return True


@pytest.mark.parametrize("world_size", WORLDS)
def test_announced_calls_find_each_other_in_any_order(world_size):
    assert run_ranks(world_size, run_announced) == [True] * world_size


def run_announces_first(launch):
    """The owner's message waits for nothing but its own: the receive was there before, and is the only one."""
    axis = axis_of(launch)
    wire, posted = C10dWire(), []
    receive = axis.group.recv
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(axis.group), "recv", lambda group, *rest: posted.append(rest) or receive(*rest))
        buffer = whole_numbers(64, axis.index)
        early = wire.expect(Collective.REDUCE, buffer, axis, owner_index=0)
        before = len(posted)
        wire.reduce(buffer, 0, axis, expected=early).wait()
    return before, len(posted)


def test_an_announced_sum_is_received_from_the_announcement_on():
    assert run_ranks(3, run_announces_first) == [(2, 2), (0, 0), (0, 0)]
