"""Measuring which form of the iteration is fastest on this machine."""

import importlib.util
from collections.abc import Callable, Iterator, Sequence

import torch

from hp_muon_plugin.bench.timing import interleave
from hp_muon_plugin.config.choices import FloatDtype, Schedule
from hp_muon_plugin.muon.algorithm import Algorithm, Form, Rule
from hp_muon_plugin.muon.coefficients import resolve_schedule
from hp_muon_plugin.muon.newton_schulz import NewtonSchulz, Stack, Target

_SHORTS = (16, 24, 64, 128, 256, 512, 1024, 2048)
_ASPECTS = (16.0, 4.0, 2.0, 1.5, 1.0)
_MATRIX_BYTES = 32 << 20  # enough matrices to fill about this much
_SMALLEST_SYMMETRIC = 256
_SMALLEST_BLOCK = 64
_MOST_FLOPS = 150e9  # of the two products with X; larger shapes would take minutes
_ANY = 1 << 62
_ALWAYS_STANDARD_BELOW = 12  # for accuracy; see the table


def calibrate(
    device: torch.device,
    *,
    budget_s: float = 1.0,
    shorts: Sequence[int] = _SHORTS,
    aspects: Sequence[float] = _ASPECTS,
    dtype: FloatDtype | None = None,
    report: Callable[[str], None] = print,
) -> list[Rule]:
    """Measure a grid of shapes and keep the fastest algorithm of each.

    Args:
        device: Where.
        budget_s: About how long to take for one shape.
        shorts: Short sides.
        aspects: Long side divided by short side, falling.
        dtype: Type of the products, for rows that decide where it is asked for. None: types among which the
            table may choose by itself.
        report: Receives one line per shape: its choice.

    Returns:
        Rows for this device, the first that fits decides. A short side between two measured ones
        goes with the one that is nearer in proportion.
    """
    smallest = Algorithm(Form.standard, dtype=_candidate_dtypes(device, dtype)[-1])
    rules = [Rule(device.type, _ALWAYS_STANDARD_BELOW, 1.0, smallest, dtype)]
    for index, short in enumerate(shorts):
        bound = _ANY if index + 1 == len(shorts) else round((short * shorts[index + 1]) ** 0.5)
        row: list[Rule] = []
        for aspect in aspects:
            long = round(short * aspect)
            if 4 * short * short * long > _MOST_FLOPS:
                continue  # what is best at the next smaller aspect is taken
            times = _times(device, short, long, dtype, budget_s)
            best = min(times, key=lambda algorithm: times[algorithm])
            told = ", ".join(f"{algorithm} {1e3 * times[algorithm]:.3g}" for algorithm in times)
            report(f"{short} x {long}: {best}   (ms: {told})")
            if row and row[-1].algorithm == best:
                row.pop()
            row.append(Rule(device.type, bound, aspect if aspect > min(aspects) else 1.0, best, dtype))
        rules += row
    return rules


def _times(
    device: torch.device, short: int, long: int, dtype: FloatDtype | None, budget_s: float
) -> dict[Algorithm, float]:
    count = max(1, min(64, _MATRIX_BYTES // (4 * short * long)))
    x = torch.randn(count, short, long, device=device)
    out = torch.empty_like(x)
    stacks = [Stack(x, (Target(out, 0, count),))]
    contenders = {}
    for algorithm in _candidates(device, short, dtype):
        engine = NewtonSchulz(resolve_schedule(Schedule.keller), algorithm, device=device)
        contenders[str(algorithm)] = (algorithm, engine)
    runs = {name: (lambda engine=engine: engine(stacks)) for name, (_, engine) in contenders.items()}
    times = interleave(runs, device=device, budget_s=budget_s, least=3, most=15)
    clock = "cpu" if device.type == "cpu" else "wall"
    return {contenders[name][0]: times[name].median(clock) for name in times}


def _candidate_dtypes(device: torch.device, asked: FloatDtype | None) -> list[FloatDtype]:
    """Types to measure. Where another is asked for on a CPU, float32 may be faster, as it is for the smallest."""
    if asked is not None:
        return [asked, FloatDtype.float32] if device.type == "cpu" and asked is not FloatDtype.float32 else [asked]
    return [FloatDtype.float32] if device.type == "cpu" else [FloatDtype.float16, FloatDtype.float32]


def _candidates(device: torch.device, short: int, asked: FloatDtype | None) -> Iterator[Algorithm]:
    for dtype in _candidate_dtypes(device, asked):
        for form in Form:
            for blocks in (1, 2, 4, 8, 16) if short >= _SMALLEST_SYMMETRIC else (1,):
                if blocks == 1 or short // blocks >= _SMALLEST_BLOCK:
                    yield Algorithm(form, blocks, dtype)
            if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
                yield Algorithm(form, 1, dtype, has_kernel=True)
