"""Where the rows of one matrix lie in a weight that holds several, as those of q, k and v in a fused one. No torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hp_muon_plugin.layout.spec import MatrixPart, MatrixView


@dataclass(frozen=True, slots=True)
class Run:
    """Elements of an item that lie at equal distances.

    Attributes:
        first: The first one's number in the item; the others follow one after another.
        start: Where it lies, counted from the item's start in the parameter.
        times: Blocks.
        length: Elements of each.
        step: From the start of one to that of the next.
    """

    first: int
    start: int
    times: int
    length: int
    step: int

    @property
    def numel(self) -> int:
        """Elements of all blocks."""
        return self.times * self.length


@dataclass(frozen=True, slots=True)
class Stripe:
    """One block in every period of a stretch.

    Attributes:
        period: Elements from one block to the next.
        offset: Elements before the first.
        length: Elements of a block.
    """

    period: int
    offset: int
    length: int

    def before(self, element: int) -> int:
        """How many of its elements lie before one of the stretch.

        Args:
            element: Counted from the start of the stretch.

        Returns:
            Their number.
        """
        blocks, rest = divmod(element, self.period)
        return blocks * self.length + min(max(rest - self.offset, 0), self.length)

    def runs(self, low: int, high: int) -> Iterator[Run]:
        """Where some of its elements lie.

        Args:
            low: Number of the first.
            high: Number after the last.

        Yields:
            At most three runs: the end of a block, whole blocks, the beginning of one.
        """
        while low < high:
            block, within = divmod(low, self.length)
            times = max(1, (high - low) // self.length) if not within else 1
            length = min(self.length - within, high - low)
            yield Run(low, block * self.period + self.offset + within, times, length, self.period)
            low += times * length


def stripe_of(view: MatrixView, part: MatrixPart) -> tuple[Stripe, MatrixView] | None:
    """One of several matrices of a weight, if it is whole rows of it in their order.

    Args:
        view: How the weight reads.
        part: One of its parts.

    Returns:
        Where its rows lie, and how they read when they stand one below another; None for anything else.
    """
    count, rows, cols = view.part_shape(part)
    in_order = (*part.batch, *part.rows, *part.cols) == tuple(range(len(view.factors)))
    if part.narrow is None or count != 1 or not rows or not cols or not in_order or part.narrow[0] in part.cols:
        return None
    dim, start, length = part.narrow
    inner, blocks = math.prod(view.factors[dim + 1 :]), math.prod(view.factors[:dim])
    stripe = Stripe(inner * view.factors[dim], inner * start, inner * length)
    factors = (blocks, rows // blocks, cols) if blocks > 1 else (rows, cols)
    *of_rows, of_cols = range(len(factors))
    return stripe, MatrixView(factors, (MatrixPart(part.label, (), tuple(of_rows), (of_cols,)),))
