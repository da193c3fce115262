"""Rates measured at start, on the ranks and links that a plan is for.

A group that crosses supernodes gets the rate of the slow link by this, without being told of it.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from hp_muon_plugin.config.optimizer import MuonRates
from hp_muon_plugin.muon.rates import Rates
from hp_muon_plugin.platform.collectives import AxisGroup, gathered_objects
from hp_muon_plugin.platform.protocol import Wire
from hp_muon_plugin.platform.wire import wait_for

_ROUNDS = 5
_RECEIVED = 4 << 20  # bytes at each rank: 0.2 s at 200 Mbit/s, long against a message elsewhere
_LEAST_SENT = 4096
_MATRICES = (8, 256, 1024)

_Seconds = tuple[float, float, float]  # of an operation, a byte, a message


def measured_rates(
    axes: Sequence[AxisGroup], options: MuonRates, *, device: torch.device, wire: Wire, agree: Sequence[AxisGroup]
) -> list[Rates]:
    """Measure what ranks do in a second. All ranks of the axes must call, in one order of these; takes some 0.1 s.

    Args:
        axes: Axes over which matrices are shared.
        options: What is stated there counts, and not what is measured.
        device: Where shards lie.
        wire: Collectives.
        agree: Axes that together reach all ranks of the model.

    Returns:
        Rates for each of ``axes``: of the slowest rank, and equal on all ranks that ``agree`` reaches, so that all
        of them plan alike.
    """
    flop_s = _seconds_of_products(device)
    own = {axis.axis: (flop_s, *_seconds_of_messages(axis, device, wire)) for axis in axes}
    slowest = _slowest({**own, "": (flop_s, 0.0, 0.0)}, [*axes, *agree])
    return [_rates(slowest, axis, options) for axis in axes]


def _rates(slowest: Mapping[str, _Seconds], axis: AxisGroup, options: MuonRates) -> Rates:
    flop_s = slowest[""][0]
    _, byte_s, message_s = slowest[axis.axis]
    flops = options.flops_per_s or 1 / flop_s
    received = options.bytes_per_s or (1 / byte_s if byte_s else float("inf"))
    message = message_s if options.message_s is None else options.message_s
    return Rates(flops, received, message, f"measured at start over {axis.axis}", options.replica_bytes_per_s)


def _seconds_of_products(device: torch.device) -> float:
    """Seconds of an operation in the two large products of the Gram form."""
    x = torch.ones(_MATRICES, device=device)
    gram, out = torch.empty(_MATRICES[0], _MATRICES[1], _MATRICES[1], device=device), torch.empty_like(x)

    def run() -> None:
        torch.bmm(x, x.mT, out=gram)
        torch.bmm(gram, x, out=out)
        out[0, 0, 0].item()  # waits for the device

    matrices, rows, cols = _MATRICES
    return _median(run) / (2 * 2 * matrices * rows**2 * cols)


def _seconds_of_messages(axis: AxisGroup, device: torch.device, wire: Wire) -> tuple[float, float]:
    """Seconds of a received byte while all ranks receive, and of a message."""
    if axis.size == 1:
        return 0.0, 0.0
    numel = max(_LEAST_SENT, _RECEIVED // axis.size) // 4

    def gather(count: int) -> Callable[[], None]:
        source, output = torch.ones(count, device=device), torch.empty(count * axis.size, device=device)

        def run() -> None:
            # equal buffers of all ranks; once, at start
            wait_for([wire.all_gather(output, source, axis)], "measurement of messages over {}", axis.axis)
            output[-1].item()

        return run

    message = _median(gather(1))
    whole = _median(gather(numel))
    return max(whole - message, 0.0) / (4 * numel * (axis.size - 1)), message


def _median(run: Callable[[], None]) -> float:
    run()
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _slowest(own: Mapping[str, _Seconds], axes: Sequence[AxisGroup]) -> dict[str, _Seconds]:
    """The most seconds of each kind on any rank that the axes reach."""
    found = dict(own)
    for axis in axes:
        if axis.group is None:
            continue
        told = gathered_objects(found, "measured rates", axis)  # some 100 bytes a rank, once; the host waits
        found = {
            name: tuple(max(each) for each in zip(*(one[name] for one in told if name in one), strict=True))
            for name in dict.fromkeys(name for one in told for name in one)
        }
    return found
