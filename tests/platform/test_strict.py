"""The strict wire: each rule has a call that breaks it, and correct programs pass."""

import itertools
import warnings

import pytest
import torch
import torch.distributed as dist

from hp_muon_plugin.platform.collectives import AxisGroup
from hp_muon_plugin.platform.counting import CountingWire, Traffic
from hp_muon_plugin.platform.first_use import UsedGroup, find_conflict
from hp_muon_plugin.platform.strict import StrictWire
from hp_muon_plugin.platform.strict_rules import Rule, StrictError, StrictWarning
from hp_muon_plugin.platform.wire import C10dWire, Collective
from tests.dist_pool import joined, run_ranks

SINGLE = AxisGroup.single("shard")


def axis_of(launch):
    if launch.world_size == 1:
        return SINGLE
    joined(launch)
    return AxisGroup.from_group("shard", dist.group.WORLD)


def strict(patience_s=20.0):
    return StrictWire(C10dWire(), patience_s=patience_s)


def refusal(function, *arguments):
    """The rule that a call breaks; None if it passes."""
    try:
        function(*arguments)
    except StrictError as error:
        return error.rule
    return None


def calls(tensor):
    """Every collective with one buffer, on one rank."""
    wire = strict()
    return {
        Collective.ALL_GATHER: lambda: wire.all_gather(torch.empty_like(tensor), tensor, SINGLE),
        Collective.REDUCE_SCATTER: lambda: wire.reduce_scatter(torch.empty_like(tensor), tensor, SINGLE),
        Collective.ALL_REDUCE: lambda: wire.all_reduce(tensor, SINGLE),
        Collective.REDUCE: lambda: wire.reduce(tensor, 0, SINGLE),
        Collective.BROADCAST: lambda: wire.broadcast(tensor, 0, SINGLE),
        Collective.ALL_TO_ALL: lambda: wire.all_to_all(
            torch.empty_like(tensor), tensor, [tensor.numel()], [tensor.numel()], SINGLE
        ),
    }


REDUCTIONS = (Collective.REDUCE_SCATTER, Collective.ALL_REDUCE, Collective.REDUCE)
COPIES = (Collective.ALL_GATHER, Collective.BROADCAST, Collective.ALL_TO_ALL)


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_float64_is_not_summed(kind):
    assert refusal(calls(torch.ones(4, dtype=torch.float64))[kind]) is Rule.FLOAT64


@pytest.mark.parametrize("kind", COPIES)
def test_float64_is_copied(kind):
    assert refusal(calls(torch.ones(4, dtype=torch.float64))[kind]) is None


@pytest.mark.parametrize("kind", list(Collective))
@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64])
def test_dtypes_without_a_collective_are_refused(kind, dtype):
    assert refusal(calls(torch.ones(4, dtype=dtype))[kind]) is Rule.DTYPE


@pytest.mark.parametrize("kind", list(Collective))
@pytest.mark.parametrize("tensor", [torch.ones(8)[::2], torch.ones(2, 2), torch.ones(())], ids=["step", "2d", "0d"])
def test_buffers_that_are_not_flat_are_refused(kind, tensor):
    assert refusal(calls(tensor)[kind]) is Rule.FLAT


@pytest.mark.parametrize("call", ["all_gather", "reduce_scatter"])
def test_two_dtypes_in_one_call_are_refused(call):
    buffers = torch.ones(4), torch.ones(4, dtype=torch.bfloat16)
    assert refusal(getattr(strict(), call), *buffers, SINGLE) is Rule.SAME_KIND


@pytest.mark.parametrize("call", ["all_gather", "reduce_scatter"])
def test_lengths_that_do_not_fit_are_refused(call):
    assert refusal(getattr(strict(), call), torch.ones(5), torch.ones(4), SINGLE) is Rule.LENGTH


@pytest.mark.parametrize("call", ["reduce", "broadcast"])
@pytest.mark.parametrize("owner_index", [-1, 1])
def test_owner_outside_the_axis_is_refused(call, owner_index):
    assert refusal(getattr(strict(), call), torch.ones(4), owner_index, SINGLE) is Rule.OWNER


def test_shifted_overlap_is_refused():
    buffer = torch.ones(5)
    assert refusal(strict().all_gather, buffer[:4], buffer[1:], SINGLE) is Rule.OVERLAP


def test_reduce_scatter_in_place_is_refused():
    buffer = torch.ones(4)
    assert refusal(strict().reduce_scatter, buffer, buffer[:], SINGLE) is Rule.OVERLAP


def test_gather_from_own_slice_is_allowed():
    buffer = torch.arange(4.0)
    strict().all_gather(buffer, buffer[:], SINGLE).wait()
    assert torch.equal(buffer, torch.arange(4.0))


def test_result_is_nan_until_wait():
    output = torch.zeros(4)
    handle = strict().all_gather(output, torch.ones(4), SINGLE)
    assert output.isnan().all()
    handle.wait()
    assert torch.equal(output, torch.ones(4))


def test_integer_result_is_the_largest_value_until_wait():
    tensor = torch.ones(4, dtype=torch.int32)
    handle = strict().all_reduce(tensor, SINGLE)
    assert (tensor == 2**31 - 1).all()
    handle.wait()
    assert (tensor == 1).all()


def test_source_of_reduce_scatter_is_destroyed():
    source = torch.ones(4)
    strict().reduce_scatter(torch.empty(4), source, SINGLE).wait()
    assert source.isnan().all()


@pytest.mark.parametrize("touched", ["output", "source"])
def test_writing_before_wait_is_refused(touched):
    buffers = {"output": torch.zeros(4), "source": torch.ones(4)}
    handle = strict().all_gather(buffers["output"], buffers["source"], SINGLE)
    buffers[touched].fill_(3.0)
    assert refusal(handle.wait) is Rule.TOUCHED


def test_broadcast_source_may_not_change_before_wait():
    tensor = torch.ones(4)
    handle = strict().broadcast(tensor, 0, SINGLE)
    assert torch.equal(tensor, torch.ones(4))  # the owner may read it
    tensor.zero_()
    assert refusal(handle.wait) is Rule.TOUCHED


def test_buffer_in_flight_is_refused_and_free_after_wait():
    wire = strict()
    output, source = torch.zeros(4), torch.ones(4)
    handle = wire.all_gather(output, source, SINGLE)
    assert refusal(wire.all_reduce, output[2:], SINGLE) is Rule.IN_FLIGHT
    assert refusal(wire.all_reduce, source[2:], SINGLE) is Rule.IN_FLIGHT
    other = wire.all_gather(torch.zeros(4), source, SINGLE)  # two may read one buffer
    handle.wait()
    other.wait()
    assert refusal(wire.all_reduce, output[2:], SINGLE) is None


def test_forgotten_handle_is_found():
    wire = strict()
    handle = wire.all_reduce(torch.ones(4), SINGLE)
    with pytest.raises(StrictError, match=r"rank 0 has not waited for .*all_reduce \(4,\)") as caught:
        wire.verify()
    assert caught.value.rule is Rule.WAITED
    handle.wait()
    wire.verify()


def run_correct_program(launch):
    axis = axis_of(launch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StrictWarning)
        wire = strict()
        gathered = torch.zeros(3 * axis.size)
        gathered[3 * axis.index :][:3] = axis.index
        shard, whole = torch.empty(3), torch.full((3 * axis.size,), 1.0 + axis.index)
        reduced, everywhere = torch.ones(2), torch.ones(2)
        sent = torch.full((2,), float(axis.index))
        others = [int(index > 0) for index in range(axis.size)]  # one number to each rank but the first
        lengths = [int(axis.index > 0)] * axis.size
        received = torch.empty(sum(lengths))
        handles = [
            wire.all_gather(gathered, gathered[3 * axis.index :][:3], axis),
            wire.reduce_scatter(shard, whole, axis),
            wire.all_reduce(everywhere, axis),
            wire.reduce(reduced, axis.size - 1, axis),
            wire.broadcast(sent, axis.size - 1, axis),
            wire.all_reduce(torch.empty(0), axis),
            wire.all_to_all(received, torch.full((axis.size - 1,), 1.0 + axis.index), lengths, others, axis),
        ]
        for handle in reversed(handles) if launch.rank % 2 else handles:  # ranks wait in different orders
            handle.wait()
        wire.verify()
    is_owner = axis.index == axis.size - 1
    assert torch.equal(gathered, torch.arange(axis.size).repeat_interleave(3).float())
    assert (shard == sum(range(1, axis.size + 1))).all()
    assert whole.isnan().all()
    assert (everywhere == axis.size).all()
    assert (reduced == axis.size).all() if is_owner else reduced.isnan().all()
    assert (sent == axis.size - 1).all()
    assert received.tolist() == ([1.0 + index for index in range(axis.size)] if axis.index else [])
    return True


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_correct_program_passes(world_size):
    assert run_ranks(world_size, run_correct_program) == [True] * world_size


def run_waits_early_or_late(launch):
    """Rank 0 waits for each call at once, rank 1 for both at the end, the last one first."""
    axis = axis_of(launch)
    wire = strict(patience_s=5.0)
    tensors = torch.ones(4), torch.full((7,), 2.0)
    handles = []
    for tensor in tensors:
        handles.append(wire.all_reduce(tensor, axis))
        if launch.rank == 0:
            handles[-1].wait()
    for handle in reversed(handles):
        handle.wait()
    return [tensor[0].item() for tensor in tensors]


def test_ranks_may_wait_early_or_late():
    assert run_ranks(2, run_waits_early_or_late) == [[2.0, 4.0]] * 2


def run_disagreement(launch, case):
    axis = axis_of(launch)
    wire = strict()
    odd = launch.rank == 1
    handle = {
        "length": lambda: wire.all_reduce(torch.ones(5 if odd else 4), axis),
        "dtype": lambda: wire.all_reduce(torch.ones(4, dtype=torch.bfloat16 if odd else torch.float32), axis),
        "owner": lambda: wire.broadcast(torch.ones(4), int(odd), axis),
        "kind": lambda: wire.reduce(torch.ones(4), 0, axis) if odd else wire.all_reduce(torch.ones(4), axis),
        "empty": lambda: wire.all_reduce(torch.ones(0 if odd else 4), axis),
    }[case]()
    with pytest.raises(StrictError, match="place 0 calls .* and place 1|place 1 calls .* and place 0") as caught:
        handle.wait()
    dist.barrier()
    return caught.value.rule


def run_lengths_that_differ(launch):
    axis = axis_of(launch)
    handle = strict().all_to_all(torch.empty(3), torch.ones(2), [1, 2], [1, 1], axis)
    with pytest.raises(StrictError, match=r"expects \[1, 2\], is sent \['1', '1'\]"):
        handle.wait()
    return True


def test_lengths_of_an_all_to_all_are_compared():
    assert run_ranks(2, run_lengths_that_differ) == [True] * 2


@pytest.mark.parametrize("case", ["length", "dtype", "owner", "kind", "empty"])
def test_ranks_that_disagree_all_say_so(case):
    assert run_ranks(2, run_disagreement, case) == [Rule.AGREEMENT] * 2


def run_refused_on_one(launch):
    axis = axis_of(launch)
    wire = strict()
    dtype = torch.float64 if launch.rank == 1 else torch.float32
    try:
        wire.all_reduce(torch.ones(4, dtype=dtype), axis).wait()
    except StrictError as error:
        dist.barrier()
        return error.rule, str(error)
    return None


def test_refusal_on_one_rank_reaches_the_others():
    (first, text), (second, _) = run_ranks(2, run_refused_on_one)
    assert (first, second) == (Rule.AGREEMENT, Rule.FLOAT64)
    assert "refused (FLOAT64" in text


def run_absent(launch):
    axis = axis_of(launch)
    if launch.rank == 0:
        handle = strict(patience_s=0.2).all_reduce(torch.ones(4), axis)
        with pytest.raises(StrictError, match=r"places \[1\] of 'shard' do not join place 0's all_reduce"):
            handle.wait()
    dist.barrier()
    return True


def test_rank_that_does_not_join_is_named():
    assert run_ranks(2, run_absent) == [True] * 2


def run_first_uses(launch, swapped):
    joined(launch)
    axes = [AxisGroup.from_group(name, dist.new_group([0, 1])) for name in ("row", "column")]
    if swapped and launch.rank == 1:
        axes.reverse()
    wire = strict()
    later = axes if launch.rank == 0 else axes[::-1]  # only the first uses matter
    handles = [wire.all_reduce(torch.ones(2), axis) for axis in (*axes, *later)]
    for handle in handles:
        handle.wait()
    try:
        wire.verify()
    except StrictError as error:
        return error.rule, str(error)
    return None


def test_first_uses_in_two_orders_are_found():
    for rule, text in run_ranks(2, run_first_uses, True):
        assert rule is Rule.FIRST_USE
        assert "rank 0 uses 'row' [0, 1] next, where rank 1 uses 'column' [0, 1]" in text


def test_first_uses_in_one_order_pass():
    assert run_ranks(2, run_first_uses, False) == [None, None]


def used(*ranks, name=None):
    return UsedGroup(name or str(ranks), "axis", ranks)


def test_circle_of_three_groups_is_a_conflict():
    """No two ranks share two groups, and still each waits for the next."""
    a, b, c = used(0, 1), used(1, 2), used(2, 0)
    assert find_conflict([[c, a], [a, b], [b, c]]) is not None
    assert find_conflict([[a, c], [a, b], [b, c]]) is None


def test_group_that_a_member_never_uses_is_a_conflict():
    assert "rank 1 never uses" in find_conflict([[used(0, 1)], []])


def test_groups_of_the_same_ranks_are_told_apart_by_name():
    first, second = used(0, 1, name="first"), used(0, 1, name="second")
    assert find_conflict([[first, second], [second, first]]) is not None
    assert find_conflict([[first, second], [first, second]]) is None


def test_rows_then_columns_of_a_mesh_pass():
    rows = [used(4 * r, 4 * r + 1, 4 * r + 2, 4 * r + 3) for r in range(4)]
    columns = [used(c, c + 4, c + 8, c + 12) for c in range(4)]
    orders = [[rows[r], columns[c]] for r, c in itertools.product(range(4), range(4))]
    assert find_conflict(orders) is None
    orders[5].reverse()  # alone: its column connects first, and its row waits for it
    assert find_conflict(orders) is None
    orders[0].reverse()  # 0 waits for 4, 4 for 5, 5 for 1, 1 for 0
    assert "rank 5" in find_conflict(orders)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("kind", list(Collective))
def test_sizes_without_support_warn(size, kind):
    axis = AxisGroup("shard", size, 0, None)  # no group: the call is checked, and fails only when it starts
    wire = strict()
    flat, shard = torch.ones(2 * size), torch.ones(2)
    start = {
        Collective.ALL_GATHER: lambda: wire.all_gather(flat, shard, axis),
        Collective.REDUCE_SCATTER: lambda: wire.reduce_scatter(shard, flat, axis),
        Collective.ALL_REDUCE: lambda: wire.all_reduce(flat, axis),
        Collective.REDUCE: lambda: wire.reduce(flat, 0, axis),
        Collective.BROADCAST: lambda: wire.broadcast(flat, 0, axis),
        Collective.ALL_TO_ALL: lambda: wire.all_to_all(torch.ones(2 * size), flat, [2] * size, [2] * size, axis),
    }[kind]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start()
    is_named = size in (3, 5, 6, 7) and kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    assert [issubclass(w.category, StrictWarning) for w in caught] == [True] * is_named


def run_counts(launch):
    axis = axis_of(launch)
    wire = CountingWire(C10dWire())
    for _ in range(2):
        wire.all_gather(torch.empty(4 * axis.size), torch.ones(4), axis).wait()
    wire.reduce_scatter(torch.empty(4), torch.ones(4 * axis.size), axis).wait()
    wire.all_reduce(torch.ones(3, dtype=torch.bfloat16), axis).wait()
    wire.all_reduce(torch.ones(0), axis).wait()
    wire.reduce(torch.ones(5), 0, axis).wait()
    wire.broadcast(torch.ones(6), 0, axis).wait()
    wire.all_to_all(
        torch.empty(4 * axis.size), torch.ones(4 * axis.size), [4] * axis.size, [4] * axis.size, axis
    ).wait()
    counts = wire.counts()
    wire.reset()
    assert wire.counts() == {}
    return counts


def test_counts_are_by_kind_and_axis():
    expected = {
        (Collective.ALL_GATHER, "shard"): Traffic(2, 2 * 8 * 4),
        (Collective.REDUCE_SCATTER, "shard"): Traffic(1, 8 * 4),
        (Collective.ALL_REDUCE, "shard"): Traffic(1, 3 * 2),
        (Collective.ALL_TO_ALL, "shard"): Traffic(1, 4 * 4),
        (Collective.REDUCE, "shard"): Traffic(1, 5 * 4),
        (Collective.BROADCAST, "shard"): Traffic(1, 6 * 4),
    }
    assert run_ranks(2, run_counts) == [expected] * 2


def test_one_rank_counts_nothing():
    assert run_ranks(1, run_counts) == [{}]
