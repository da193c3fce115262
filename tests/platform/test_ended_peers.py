"""A rank that has ended: whatever is begun with it afterwards says which exchange it was."""

import time

import torch
import torch.distributed as dist

from hp_muon_plugin.platform.collectives import (
    AxisGroup,
    all_gather,
    all_reduce_max,
    all_reduce_sum,
    gathered_objects,
    sum_over_ranks,
)
from hp_muon_plugin.platform.kinds import Collective
from hp_muon_plugin.platform.wire import C10dWire, wait_for
from tests.dist_pool import joined, run_ranks


def _calls(wire, axis):
    """Every call of a wire, by name; what needs an announcement makes it."""
    one, two = torch.ones(4), torch.ones(8)

    def announced(kind, owner):
        early = wire.expect(kind, one, axis, owner_index=owner)
        call = wire.reduce if kind is Collective.REDUCE else wire.broadcast
        return call(one, owner, axis, expected=early)

    return {
        "all_gather": lambda: wire.all_gather(two, one, axis),
        "reduce_scatter": lambda: wire.reduce_scatter(one, two, axis),
        "all_reduce": lambda: wire.all_reduce(one, axis),
        "reduce here": lambda: wire.reduce(one, 0, axis),
        "reduce there": lambda: wire.reduce(one, 1, axis),
        "announced reduce here": lambda: announced(Collective.REDUCE, 0),
        "announced reduce there": lambda: announced(Collective.REDUCE, 1),
        "broadcast from here": lambda: wire.broadcast(one, 0, axis),
        "broadcast from there": lambda: wire.broadcast(one, 1, axis),
        "announced broadcast from here": lambda: announced(Collective.BROADCAST, 0),
        "announced broadcast from there": lambda: announced(Collective.BROADCAST, 1),
        "all_to_all": lambda: wire.all_to_all(two, two.clone(), [4, 4], [4, 4], axis),
    }


def _error(function):
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return "no error"


def _run(launch):
    joined(launch, timeout_s=20.0)
    axis, one = AxisGroup.from_group("shard", dist.group.WORLD), torch.ones(4)
    wire = C10dWire()
    wait_for([wire.all_gather(torch.empty(8), one, axis)], "first exchange over {}", axis.axis)
    if launch.rank == 1:
        dist.destroy_process_group()
        return {}
    deadline = time.monotonic() + 15.0
    while _error(lambda: dist.group.WORLD.send([one], 1, 7)) == "no error":  # until beginning itself fails
        assert time.monotonic() < deadline
        time.sleep(0.01)
    told = {}
    for name, begin in _calls(wire, axis).items():
        handle = begin()  # says nothing yet: here nobody knows what it is
        told[name] = _error(lambda handle=handle: wait_for([handle], "exchange of numbers over {}", axis.axis))
    told["maximum over shard"] = _error(lambda: all_reduce_max(one, axis))
    told["sum over shard"] = _error(lambda: all_reduce_sum(one, axis))
    told["all-gather over shard"] = _error(lambda: all_gather(torch.empty(8), one, axis))
    told["exchange of words over shard"] = _error(lambda: gathered_objects("word", "words", axis))
    told["exchange of words over all ranks"] = _error(lambda: gathered_objects("word", "words"))
    told["sum of losses over all ranks"] = _error(lambda: sum_over_ranks(one, "losses"))
    return told


def test_what_is_begun_with_a_rank_that_has_ended_is_named() -> None:
    """Only what was waited for was named; gloo's "Connection closed by peer" came out where a message was begun."""
    told, _ = run_ranks(2, _run)
    assert len(told) == 18
    for name, text in told.items():
        what = name if " over " in name else "exchange of numbers over shard"
        assert text.startswith(f"{what} failed: another rank ended, or waits for something else\n"), (name, text)
