"""Newton-Schulz coefficient schedules, by name.

One step maps every singular value ``s`` to ``a s + b s^3 + c s^5``. A schedule is the list of
``(a, b, c)`` of its steps. The iteration starts from the matrix divided by its Frobenius norm, so
singular values lie in ``(0, 1]``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hp_muon_plugin.config.choices import Schedule
from hp_muon_plugin.errors import ConfigError

Coefficients = tuple[float, float, float]

_KELLER: Coefficients = (3.4445, -4.7750, 2.0315)
# Taylor step of order five: pulls singular values that are already near 1 to 1, never away from it.
_TAYLOR: Coefficients = (1.875, -1.25, 0.375)


_YOU: tuple[Coefficients, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


@dataclass(frozen=True, slots=True)
class ScheduleSpec:
    """A named schedule.

    Attributes:
        rows: ``(a, b, c)`` of every step that the schedule is made for.
        extension: Rows for further steps; the last one repeats.
        smallest: Smallest singular value of the normalised matrix that ends up at 0.7 or more.
        source: Where the numbers come from; they are given with four decimals there unless it says otherwise.
    """

    rows: tuple[Coefficients, ...]
    extension: tuple[Coefficients, ...]
    smallest: float
    source: str


SCHEDULES: dict[Schedule, ScheduleSpec] = {
    Schedule.keller: ScheduleSpec(
        rows=(_KELLER,) * 5,
        extension=(_KELLER,),
        smallest=1.6e-3,
        source="Keller Jordan, Muon (2024); torch.optim.Muon, Moonlight. Ends in about [0.68, 1.13] on purpose",
    ),
    Schedule.you: ScheduleSpec(
        rows=_YOU,
        extension=(_TAYLOR,),
        smallest=1.6e-3,
        source="You Jiacheng, modded-nanogpt (2025); 'quintic' of Emerging-Optimizers. Ends in about [0.98, 1.03]",
    ),
    Schedule.asym5: ScheduleSpec(
        rows=_YOU,
        extension=(_TAYLOR,),
        smallest=1.6e-3,
        source="HyperParallel's default; the same numbers as 'you', taken there from dion",
    ),
    Schedule.polar_express: ScheduleSpec(
        rows=(
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
        ),
        extension=((1.8726, -1.2307, 0.3585), (1.8564, -1.2132, 0.3568), _TAYLOR),
        smallest=7.8e-4,
        source="Polar Express, arXiv 2505.16932, divided by its safety factor 1.01^degree",
    ),
    Schedule.cans: ScheduleSpec(
        rows=(
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        ),
        extension=(_TAYLOR,),
        smallest=7.3e-4,
        source="CANS, arXiv 2506.10935 (Chebyshev-type, adaptive interval)",
    ),
    Schedule.cubic: ScheduleSpec(
        rows=(
            (3.3656576, -3.3420992, 0.0),
            (2.5744352, -1.4957376, 0.0),
            (2.5368962, -1.4312570, 0.0),
            (2.4418906, -1.2764040, 0.0),
            (2.2230472, -0.9630650, 0.0),
        ),
        extension=(_TAYLOR,),
        smallest=6.2e-3,
        source="Relaxed cubic, arXiv 2606.00371 (seven decimals); no square of the Gram matrix. Ends in [0.77, 1.30]",
    ),
    Schedule.deepseek_v4: ScheduleSpec(
        rows=(_KELLER,) * 8 + ((2.0, -1.5, 0.5),) * 2,
        extension=((2.0, -1.5, 0.5),),
        smallest=1.0e-5,
        source="DeepSeek-V4 report: eight Keller steps, then two that converge",
    ),
}


def resolve_schedule(
    schedule: Schedule, *, steps: int | None = None, custom: Sequence[Sequence[float]] | None = None
) -> tuple[Coefficients, ...]:
    """The coefficients of every step.

    A schedule whose steps are all alike may be run for fewer steps. Any other is whole or longer:
    its first steps alone leave singular values outside the band that it is made for.

    Args:
        schedule: Name.
        steps: Number of steps, or None for as many as the schedule is made for.
        custom: Rows for ``schedule=custom``.

    Returns:
        One ``(a, b, c)`` for each step.

    Raises:
        ConfigError: If ``steps`` would cut the schedule, or extend a custom one.
    """
    if schedule is Schedule.custom:
        rows = tuple((float(a), float(b), float(c)) for a, b, c in custom or ())
        extension: tuple[Coefficients, ...] = ()
    else:
        rows, extension = SCHEDULES[schedule].rows, SCHEDULES[schedule].extension
    if steps is None or steps == len(rows):
        return rows
    if steps < len(rows):
        if len(set(rows)) == 1:
            return rows[:steps]
        why = f"schedule {schedule} has {len(rows)} different steps, and its first {steps} alone do not converge"
        raise ConfigError("optimizer.steps", steps, why, f"leave optimizer.steps out (it is {len(rows)} then)")
    if not extension:
        why = f"optimizer.coefficients has {len(rows)} rows"
        raise ConfigError("optimizer.steps", steps, why, "give one row for each step, or leave optimizer.steps out")
    tail = [extension[min(i, len(extension) - 1)] for i in range(steps - len(rows))]
    return rows + tuple(tail)
