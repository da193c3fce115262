"""Where the ranks of an axis cut a parameter, in as many numbers as ranks hold something of it.

Of 100,000 ranks that share a model, few hold a part of any one weight. So only these are stored, and what
reads cuts sees all of them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import overload


@dataclass(frozen=True, slots=True)
class Cuts(Sequence[int]):
    """Rank i of an axis holds elements ``cuts[i]`` to ``cuts[i + 1]``: ``size + 1`` numbers, ascending from 0.

    Attributes:
        size: Ranks.
        first: The first rank that holds something; 0 if none does.
        ends: 0, then where that rank and each one after it end, up to the last that holds something.
    """

    size: int
    first: int
    ends: tuple[int, ...]

    @classmethod
    def of(cls, cuts: Sequence[int]) -> "Cuts":
        """The same from all numbers.

        Args:
            cuts: ``(ranks + 1,)``, ascending from 0.

        Returns:
            Equal objects for equal numbers.
        """
        if isinstance(cuts, Cuts):
            return cuts
        first, last = bisect_right(cuts, 0) - 1, bisect_left(cuts, cuts[-1])
        if not cuts[-1]:
            first = last = 0
        return cls(len(cuts) - 1, first, tuple(cuts[first : last + 1]))

    def __len__(self) -> int:
        return self.size + 1

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return tuple(self[place] for place in range(*index.indices(self.size + 1)))
        place = index if index >= 0 else index + self.size + 1
        if not 0 <= place <= self.size:
            raise IndexError(index)
        return self.ends[min(max(place - self.first, 0), len(self.ends) - 1)]

    def __iter__(self) -> Iterator[int]:
        return (self[place] for place in range(self.size + 1))

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return self.ends[-1]

    @property
    def holders(self) -> tuple[int, ...]:
        """Ranks that hold something, ascending."""
        return tuple(rank for rank, _, _ in self.pieces())

    @property
    def is_shared(self) -> bool:
        """Whether more than one rank holds something."""
        pieces = self.pieces()
        return next(pieces, None) is not None and next(pieces, None) is not None

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """``(rank, start, stop)`` for every rank that holds something, ascending."""
        for rank, (start, stop) in enumerate(pairwise(self.ends), self.first):
            if start < stop:
                yield rank, start, stop

    def clipped(self, start: int, stop: int) -> "Cuts":
        """Of a stretch of the parameter.

        Args:
            start: Its first element.
            stop: The element after the last.

        Returns:
            Its cuts, counted from ``start``.
        """
        assert 0 <= start < stop <= self.numel, (start, stop, self)
        low, high = bisect_right(self.ends, start) - 1, bisect_left(self.ends, stop)
        ends = tuple(min(end, stop) - start for end in self.ends[low + 1 : high + 1])
        return Cuts(self.size, self.first + low, (0, *ends))

    def mapped(self, place: Callable[[int], int]) -> "Cuts":
        """Of some of the elements.

        Args:
            place: How many of these lie before an element.

        Returns:
            Their cuts; a rank between the first and the last that hold some may hold nothing.
        """
        ends = [place(end) for end in self.ends]
        low = next((index for index in range(len(ends) - 1) if ends[index + 1]), 0)
        high = next((index for index in range(low + 1, len(ends)) if ends[index] == ends[-1]), low + 1)
        return Cuts(self.size, self.first + low if ends[-1] else 0, tuple(ends[low : high + 1]))
