"""How many steps one Gram matrix may be carried before it is computed anew.

The Gram form iterates on ``R = X X^T`` without looking at ``X`` again. A rounding error of one unit
``u`` in ``R`` is a spurious eigenvalue that every step multiplies by ``a^2``; once it reaches order
one it explodes. So the steps between two looks at ``X`` are derived from the coefficients and from
``u``, never set by hand (docs/newton_schulz.md). No torch here: plans need the rule too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hp_muon_plugin.muon.coefficients import Coefficients


@dataclass(frozen=True, slots=True)
class GramPrecision:
    """Precision in which a Gram matrix is computed and stored.

    Attributes:
        unit: Unit roundoff of its products.
        tolerated: Largest error growth times unit roundoff. Measured: smaller units can afford less.
    """

    unit: float
    tolerated: float


IEEE_FLOAT32 = GramPrecision(2.0**-24, 0.02)
TF32 = GramPrecision(2.0**-11, 0.5)
FLOAT16 = GramPrecision(2.0**-11, 0.5)
BFLOAT16 = GramPrecision(2.0**-8, 2.0)

_LEAST_FACTOR_FOR_MIRRORING = 0.5  # keller 0.64, you 0.02; docs/newton_schulz.md has the errors


def segments(coefficients: Sequence[Coefficients], precision: GramPrecision) -> tuple[tuple[Coefficients, ...], ...]:
    """Divide a schedule into runs of steps that one Gram matrix carries.

    Args:
        coefficients: ``(a, b, c)`` of every step.
        precision: Of the Gram matrix.

    Returns:
        Runs in order; the Gram matrix is computed anew at the start of each. Runs are as long as
        ``(product of a)^2 * unit <= tolerated`` allows, and at least one step.
    """
    runs: list[list[Coefficients]] = []
    growth = 1.0
    for row in coefficients:
        growth *= row[0] ** 2
        if not runs or growth * precision.unit > precision.tolerated:
            runs.append([])
            growth = row[0] ** 2
        runs[-1].append(row)
    return tuple(tuple(run) for run in runs)


def are_factors_mirrored(run: Sequence[Coefficients]) -> bool:
    """Whether a symmetric product may stand in for ``P Q`` in the recurrence of the factors.

    Where a step shrinks the leading singular value of a low-rank matrix by a factor ``f``, the rounding
    of ``P`` is ``1 / f`` times as large beside it, and later steps amplify what of it falls outside the
    matrix. Multiplied from the left, ``Q X`` never sees that part; the mirrored half of a symmetric
    product does, and costs ten times the accuracy.

    Args:
        run: ``(a, b, c)`` of its steps.

    Returns:
        Whether no step shrinks any singular value by more than half: the smallest value of
        ``a + b s^2 + c s^4`` is ``a - b^2 / 4c``.
    """
    return all(c > 0 and a - b * b / (4 * c) >= _LEAST_FACTOR_FOR_MIRRORING for a, b, c in run)
