"""Ranges of numeric options, declared where the option is.

``lr: float = number(5e-3, above=0)`` is a dataclass field with a default and a range. A test
refuses a numeric option without one, so that no value reaches a rank that makes no sense there.
"""

import math
from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

from hp_muon_plugin.errors import ConfigError

Number = TypeVar("Number")

LARGEST = 1e30
"""Larger numbers leave float32, in which everything is computed, at the first product."""
_KEY = "hp_muon_range"


@dataclass(frozen=True, slots=True)
class Range:
    """Which values a number may have; NaN, infinity and what float32 does not hold are never among them.

    Attributes:
        least: Smallest value, itself allowed.
        above: Value that it must be greater than.
        most: Largest value, itself allowed.
        below: Value that it must be less than.
        example: A sensible value.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    example: object = None

    def holds(self, value: float) -> bool:
        """Whether a value is allowed.

        Args:
            value: The value.

        Returns:
            True if it is inside.
        """
        return (
            abs(value) <= LARGEST  # false for NaN
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def words(self) -> list[str]:
        """The limits as a message says them."""
        limits = [
            ("at least", self.least),
            ("greater than", self.above),
            ("at most", self.most),
            ("less than", self.below),
        ]
        return [f"{words} {limit}" for words, limit in limits if limit is not None]


def number(
    default: Number,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    example: object = None,
) -> Number:
    """A numeric option: its default and the values that it may have.

    Args:
        default: Default; None for an option that may be left out.
        least: Smallest value, itself allowed.
        above: Value that it must be greater than.
        most: Largest value, itself allowed.
        below: Value that it must be less than.
        example: What to suggest instead of a wrong value; None suggests the default.

    Returns:
        A dataclass field.
    """
    metadata = {_KEY: Range(least, above, most, below, default if example is None else example)}
    declared: Number = field(default=default, metadata=metadata)
    return declared


def numbers(default: list[float], *, least: float | None = None, below: float | None = None) -> list[float]:
    """An option that is a list of numbers: its default and the values that each of them may have.

    Args:
        default: Default.
        least: Smallest value, itself allowed.
        below: Value that each must be less than.

    Returns:
        A dataclass field.
    """
    metadata = {_KEY: Range(least=least, below=below, example=_written(default))}
    declared: list[float] = field(default_factory=lambda: list(default), metadata=metadata)
    return declared


def declared_range(option: "Field[Any]") -> Range | None:
    """The range of an option.

    Args:
        option: A field of one of our option classes.

    Returns:
        The range, or None if it was not made by :func:`number` or :func:`numbers`.
    """
    return option.metadata.get(_KEY)


def check_ranges(options: object, prefix: str = "") -> Iterator[ConfigError]:
    """Check every number of options and of the options nested in them.

    Args:
        options: An instance of one of our option classes.
        prefix: Dotted name of ``options``, as the user writes it.

    Yields:
        One error for each option with a value outside its range.
    """
    assert is_dataclass(options), options
    for option in fields(options):
        value, name = getattr(options, option.name), f"{prefix}.{option.name}" if prefix else option.name
        limits = declared_range(option)
        if is_dataclass(value):
            yield from check_ranges(value, name)
        elif limits is not None and not all(limits.holds(single) for single in _singles(value)):
            why = " and ".join([*_size_words(_singles(value)), *limits.words()])
            yield ConfigError(name, _written(value), f"must be {why}", f"e.g. {name}={_written(limits.example)}")


def _size_words(values: list[float]) -> list[str]:
    if not all(abs(value) < math.inf for value in values):  # math.isfinite refuses an int of 400 digits
        return ["finite"]
    return [f"between -{LARGEST:g} and {LARGEST:g}"] if max(map(abs, values)) > LARGEST else []


def _singles(value: Any) -> list[float]:
    if value is None:
        return []
    if isinstance(value, list):
        return [single for item in value for single in _singles(item)]
    return [value]


def _written(value: object) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, list):
        return f"[{','.join(_written(item) for item in value)}]"
    return f"{value:g}" if isinstance(value, float) else str(value)
