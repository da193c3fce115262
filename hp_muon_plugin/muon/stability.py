"""Which schedules half precision can compute: some steps let no singular value pass 1 by a rounding error.

A schedule that is made for an interval maps what lies a little above its end far away, and the steps behind it
further: a matrix that rounding has taken there ends with singular values of 1e9 and more. No torch here: plans
need the rule too.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hp_muon_plugin.config.choices import FloatDtype
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.muon.algorithm import TABLE, Algorithm, Form, Rule
from hp_muon_plugin.muon.coefficients import Coefficients, resolve_schedule
from hp_muon_plugin.muon.rule_file import load_table

_GROWTH = 2.0  # of what the schedule does without rounding; 1.01 at most, or 1e6 and more, for the named ones


def largest_value(coefficients: Sequence[Coefficients], unit: float) -> float:
    """The largest singular value that a schedule can end with.

    Args:
        coefficients: ``(a, b, c)`` of every step.
        unit: By how much of itself a value may be rounded upwards before the first step and after each.

    Returns:
        A bound; infinite where it leaves the range of numbers.
    """
    largest = 1.0 + unit
    for a, b, c in coefficients:
        if largest > 1e30:
            return math.inf
        at = [largest, *(value for value in _turning_points(a, b, c) if value < largest)]
        largest = (1.0 + unit) * max(abs(a * s + b * s**3 + c * s**5) for s in at)
    return largest


def _turning_points(a: float, b: float, c: float) -> list[float]:
    """Where ``a + 3 b s^2 + 5 c s^4`` is zero, positive ``s``."""
    if c == 0.0:
        squares = [-a / (3 * b)] if b else []
    else:
        root = 9 * b * b - 20 * a * c
        squares = [(-3 * b + sign * math.sqrt(root)) / (10 * c) for sign in (-1, 1)] if root >= 0 else []
    return [math.sqrt(square) for square in squares if square > 0]


def is_stable(coefficients: Sequence[Coefficients], dtype: FloatDtype) -> bool:
    """Whether products of a type keep all singular values near where a schedule takes them.

    Args:
        coefficients: ``(a, b, c)`` of every step.
        dtype: Type of the products.

    Returns:
        Always true for float32: what a schedule does there is its own.
    """
    if dtype is FloatDtype.float32:
        return True
    unit = Algorithm(Form.standard, dtype=dtype).precision.unit
    return largest_value(coefficients, unit) <= _GROWTH * max(1.0, largest_value(coefficients, 0.0))


def coefficients_of(config: HpMuon) -> tuple[Coefficients, ...]:
    """The coefficients that options ask for.

    Args:
        config: Options.

    Returns:
        One ``(a, b, c)`` for each step.

    Raises:
        ConfigError: If there is no such schedule, or the type that is asked for cannot compute it.
    """
    coefficients = resolve_schedule(config.schedule, steps=config.steps, custom=config.coefficients)
    if config.ns_dtype is not None and not is_stable(coefficients, config.ns_dtype):
        raise ConfigError(
            "optimizer.ns_dtype",
            config.ns_dtype,
            f"rounds singular values past 1, from where optimizer.schedule={config.schedule} takes them to any size",
            "optimizer.ns_dtype=float32, or a schedule with a margin, such as polar_express or keller",
        )
    return coefficients


def schedule_and_table(
    config: HpMuon, table: Sequence[Rule] | None = None
) -> tuple[tuple[Coefficients, ...], Sequence[Rule]]:
    """The coefficients that options ask for, and the table of algorithms that can compute them.

    Args:
        config: Options.
        table: Rows; None for ``config.ns_table`` or the built-in ones.

    Returns:
        Both; float32 stands where the table has a type that the schedule does not bear and nobody asked for.

    Raises:
        ConfigError: See :func:`coefficients_of` and :func:`load_table`.
    """
    coefficients = coefficients_of(config)
    if table is None:
        table = load_table(Path(config.ns_table)) if config.ns_table else TABLE
    unstable = {dtype for dtype in FloatDtype if not is_stable(coefficients, dtype)}
    if not unstable:
        return coefficients, table
    return coefficients, [_exact(rule) if rule.algorithm.dtype in unstable else rule for rule in table]


def _exact(rule: Rule) -> Rule:
    return replace(rule, algorithm=replace(rule.algorithm, dtype=FloatDtype.float32))
