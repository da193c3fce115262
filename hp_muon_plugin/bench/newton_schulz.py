"""``hp-muon bench newton-schulz``: ours against the iterations that others run."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hp_muon_plugin.bench.machine import Rates
from hp_muon_plugin.bench.ns_cases import Case, Matrices
from hp_muon_plugin.bench.ns_peers import Peer, peers
from hp_muon_plugin.bench.report import Row
from hp_muon_plugin.bench.timing import Times, interleave, paired_ratio
from hp_muon_plugin.config.choices import FloatDtype, Schedule
from hp_muon_plugin.muon.algorithm import TABLE, Algorithm, Rule, choose
from hp_muon_plugin.muon.coefficients import resolve_schedule
from hp_muon_plugin.muon.newton_schulz import NewtonSchulz, Stack, Target
from hp_muon_plugin.muon.reference import reference_newton_schulz

OURS = "ours"
_KEEP, _SCALE = 0.999, -0.01
_JUDGED = 2  # matrices of a case whose result is compared with the float64 iteration
_AS_ACCURATE = 10.0  # a peer counts as accurate as ours with up to this many times our error
_NO_KERNEL = re.compile(
    "_local_scalar_dense|_unsafe_view|alias|as_strided|detach|diagonal|expand|item|mT|permute|select|slice|split"
    "|split_with_sizes|squeeze|t|transpose|unbind|unfold|unsqueeze|view"
)


@dataclass(frozen=True, slots=True)
class Contest:
    """What runs for one case.

    Attributes:
        case: The case.
        algorithm: What the table chose for ours.
        runs: By name, ours first.
        results: By name: the polar factors, without an update.
    """

    case: Case
    algorithm: Algorithm
    runs: dict[str, Callable[[], object]]
    results: dict[str, Callable[[], Sequence[torch.Tensor]]]


def contest(
    case: Case, device: torch.device, *, table: Sequence[Rule] = TABLE, dtype: FloatDtype | None = None
) -> Contest:
    """Prepare ours and every installed peer on one input.

    Args:
        case: What to work on.
        device: Where.
        table: Algorithms of ours.
        dtype: Type of ours; None leaves it to the table.

    Returns:
        The contest.
    """
    xs = case.matrices(device)
    algorithm = choose(device.type, case.short, case.long, table=table, dtype=dtype)
    found = peers()
    results: dict[str, Callable[[], Sequence[torch.Tensor]]] = {OURS: _ours(case, xs, algorithm, None)}
    results |= {name: _bound(peer, xs) for name, peer in found.items()}
    if not case.has_update:
        return Contest(case, algorithm, dict(results), results)
    weights = {name: case.matrices(device, seed=1) for name in results}
    runs: dict[str, Callable[[], object]] = {OURS: _ours(case, xs, algorithm, weights[OURS])}
    runs |= {name: _updating(peer, xs, weights[name]) for name, peer in found.items()}
    return Contest(case, algorithm, runs, results)


def measure(
    contest: Contest, rates: Rates, device: torch.device, *, clock: str, budget_s: float, errors: dict[str, float]
) -> Row:
    """Time a contest with the number of threads that is set.

    Args:
        contest: What runs.
        rates: The machine's roofs at this number of threads.
        device: Where.
        clock: ``cpu`` or ``wall``.
        budget_s: About how long to take.
        errors: Relative errors by name, from :func:`judge`.

    Returns:
        The row.
    """
    case = contest.case
    times = interleave(contest.runs, device=device, budget_s=budget_s)
    ratios = {name: paired_ratio(times[name], times[OURS], clock) for name in times if name != OURS}
    limit = _AS_ACCURATE * errors[OURS]
    right = [ratio for name, ratio in ratios.items() if errors[name] <= limit]
    return Row(
        case=str(case),
        threads=torch.get_num_threads(),
        clock=clock,
        ours=1e3 * times[OURS].median(clock),
        peers={name: 1e3 * times[name].median(clock) for name in ratios},
        ratio=min(ratios.values()),
        floor=1e3 * rates.floor_s(least_flops(case), least_bytes(case)),
        right_ratio=min(right) if right else None,
        ratios=ratios,
        wall={name: 1e3 * times[name].median("wall") for name in times} if clock == "cpu" else {},
        wall_ratios={name: paired_ratio(times[name], times[OURS], "wall") for name in ratios} if clock == "cpu" else {},
        errors=errors,
        notes=_notes(contest, times[OURS], clock),
    )


def judge(contest: Contest) -> dict[str, float]:
    """Relative Frobenius error of everyone's polar factors against the float64 iteration.

    Args:
        contest: What ran.

    Returns:
        By name: the largest error of the first matrices.
    """
    coefficients = resolve_schedule(Schedule.keller)
    xs = contest.case.matrices(torch.device("cpu")).each[:_JUDGED]
    wanted = [reference_newton_schulz(x, coefficients) for x in xs]
    found = {}
    for name, run in contest.results.items():
        results = run()
        found[name] = max(
            float((got.cpu().double() - right).norm() / right.norm())
            for got, right in zip(list(results)[:_JUDGED], wanted, strict=True)
        )
    return found


def least_flops(case: Case) -> float:
    """Operations that no polynomial iteration avoids: one symmetric Gram product, one application."""
    return 3.0 * case.short**2 * case.long * case.count


def least_bytes(case: Case) -> float:
    """float32 bytes that none avoids: the input read, the result written, weights read for an update."""
    return 4.0 * case.numel * (3 if case.has_update else 2)


def kernels(run: Callable[[], object], device: torch.device) -> Counter[str]:
    """Kernels that a run launches: on a device what its profiler saw, on the CPU what was dispatched.

    Args:
        run: What to watch, after it ran once.
        device: Where.

    Returns:
        Launches by name.
    """
    if device.type == "cpu":
        with _Dispatched() as dispatched:
            run()
        return Counter(dispatched.names)
    activity = torch.profiler.ProfilerActivity
    chosen = [activity.CPU, activity.CUDA if device.type == "cuda" else activity.PrivateUse1]
    with torch.profiler.profile(activities=chosen) as record:
        run()
        torch.get_device_module(device.type).synchronize()
    names = [event.name for event in record.events() or () if event.device_type.name != "CPU"]
    return Counter(names)


class _Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        if not _NO_KERNEL.fullmatch(name):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def _notes(contest: Contest, times: Times, clock: str) -> dict[str, Any]:
    case, coefficients = contest.case, resolve_schedule(Schedule.keller)
    lengths = contest.algorithm.run_lengths(coefficients)
    flops = case.count * contest.algorithm.flops(case.short, case.long, lengths)
    return {
        "algorithm": str(contest.algorithm),
        "runs": list(lengths),
        "GFLOP": round(flops / 1e9, 3),
        "GFLOP/s": round(flops / times.median(clock) / 1e9, 1),
        "rounds": len(times.cpu),
    }


def _ours(
    case: Case, xs: Matrices, algorithm: Algorithm, weights: Matrices | None
) -> Callable[[], Sequence[torch.Tensor]]:
    device = xs.each[0].device
    engine = NewtonSchulz(resolve_schedule(Schedule.keller), algorithm, device=device)
    out = case.matrices(device) if weights is None else weights
    keep, scale = (0.0, 1.0) if weights is None else (_KEEP, _SCALE)
    if xs.whole is not None and out.whole is not None:
        stacks = [Stack(xs.whole, (Target(out.whole, 0, case.count, keep, scale),))]
    else:
        pairs = zip(xs.each, out.each, strict=True)
        stacks = [Stack(x[None], (Target(target[None], 0, 1, keep, scale),)) for x, target in pairs]

    def run() -> Sequence[torch.Tensor]:
        engine(stacks)
        return out.each

    return run


def _bound(peer: Peer, xs: Matrices) -> Callable[[], Sequence[torch.Tensor]]:
    return lambda: peer(xs)


def _updating(peer: Peer, xs: Matrices, weights: Matrices) -> Callable[[], object]:
    def run() -> None:
        for weight, polar in zip(weights.each, peer(xs), strict=True):
            weight.mul_(_KEEP).add_(polar, alpha=_SCALE)

    return run
