"""Where the cut over an axis falls in the matrices of a parameter.

A parameter is cut evenly along one dim of ``split.factors``, and reads as matrices in the dims of
``view.factors``. Both number the same elements. Where the number of the rank is a dim of its own
among the matrices' dims, each rank holds either whole matrices, or equal slices of every matrix.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from hp_muon_plugin.layout.spec import AxisSplit, MatrixPart, MatrixView, ParamSpec


class Cut(StrEnum):
    """Which side of its matrices the ranks of an axis divide."""

    none = "none"
    rows = "rows"
    cols = "cols"


@dataclass(frozen=True, slots=True)
class LocalView:
    """How one rank's share of a parameter reads as matrices, or as slices of them.

    Attributes:
        view: Of the rank's elements, in the order in which it stores them.
        whole: Of the whole parameter, with the dim that numbers the ranks.
        dim: That dim of ``whole.factors``.
        cuts: For every part of both views, which side is cut; ``none`` for whole matrices.
    """

    view: MatrixView
    whole: MatrixView
    dim: int
    cuts: tuple[Cut, ...]


def local_view(spec: ParamSpec) -> LocalView | None:
    """Find the dim that numbers the ranks.

    Args:
        spec: A parameter with a view that is cut over an axis.

    Returns:
        The views, or None where ranks hold unequal shares of some matrices: a query group that is cut
        gives one rank queries and another one keys.
    """
    assert spec.view is not None, spec
    assert spec.split is not None, spec
    split, view = spec.split, spec.view
    step = math.prod(split.factors[split.dim :]) // split.size  # elements from one rank's block to the next one's
    refined = [
        _refined(size, math.prod(view.factors[dim + 1 :]), (step * split.size, step))
        for dim, size in enumerate(view.factors)
    ]
    if any(sizes is None for sizes in refined):
        return None
    factors = [size for sizes in refined for size in sizes or ()]
    dim = next((dim for dim in range(len(factors)) if _is_at(factors, dim, step, split.size)), None)
    if dim is None:
        return None
    firsts = [sum(len(sizes or ()) for sizes in refined[:old]) for old in range(len(refined))]
    news = [tuple(range(first, first + len(sizes or ()))) for first, sizes in zip(firsts, refined, strict=True)]
    parts, cuts = [], []
    for part in view.parts:
        if part.narrow is not None and (len(news[part.narrow[0]]) > 1 or news[part.narrow[0]] == (dim,)):
            return None
        moved = _moved(part, news)
        parts.append(moved)
        cuts.append(Cut.rows if dim in moved.rows else Cut.cols if dim in moved.cols else Cut.none)
    own = [_without(part, dim) for part in parts]
    local = MatrixView((*factors[:dim], *factors[dim + 1 :]), tuple(own))
    return LocalView(local, MatrixView(tuple(factors), tuple(parts)), dim, tuple(cuts))


def whole_part_spec(spec: ParamSpec, local: LocalView, index: int) -> ParamSpec:
    """One part of a cut parameter as a parameter of its own, in batch, rows, cols order.

    Args:
        spec: The parameter.
        local: Its :func:`local_view`.
        index: The part.

    Returns:
        A spec that is cut over the same axis.
    """
    assert spec.split is not None
    part = local.whole.parts[index]
    sizes, only = _apart(local.whole, part)
    dim = (*part.batch, *part.rows, *part.cols).index(local.dim)
    split = AxisSplit(spec.split.axis, spec.split.size, sizes, dim)
    name = f"{spec.name}[{part.label}]" if part.label else spec.name
    return replace(spec, name=name, shape=sizes, view=MatrixView(sizes, (only,)), split=split)


def local_part_spec(spec: ParamSpec, local: LocalView, index: int) -> ParamSpec:
    """One rank's share of one part, as :func:`whole_part_spec`, but not cut.

    Args:
        spec: The parameter.
        local: Its :func:`local_view`.
        index: The part.

    Returns:
        A spec whose matrices are the rank's slices.
    """
    part = local.view.parts[index]
    sizes, only = _apart(local.view, part)
    name = f"{spec.name}[{part.label}]" if part.label else spec.name
    return replace(spec, name=name, shape=sizes, view=MatrixView(sizes, (only,)), split=None)


def _apart(view: MatrixView, part: MatrixPart) -> tuple[tuple[int, ...], MatrixPart]:
    sizes = list(view.factors)
    if part.narrow is not None:
        sizes[part.narrow[0]] = part.narrow[2]
    ends = [0, len(part.batch), len(part.batch) + len(part.rows), len(sizes)]
    batch, rows, cols = (tuple(range(*bounds)) for bounds in zip(ends, ends[1:], strict=False))
    return tuple(sizes[dim] for dim in (*part.batch, *part.rows, *part.cols)), MatrixPart(part.label, batch, rows, cols)


def _refined(size: int, stride: int, points: tuple[int, int]) -> tuple[int, ...] | None:
    """A dim cut where strides reach the points, outermost first, or None where it cannot be."""
    bounds = [stride * size, *[point for point in points if stride < point < stride * size], stride]
    if any(outer % inner for outer, inner in zip(bounds, bounds[1:], strict=False)):
        return None
    return tuple(outer // inner for outer, inner in zip(bounds, bounds[1:], strict=False))


def _is_at(factors: Sequence[int], dim: int, stride: int, size: int) -> bool:
    return factors[dim] == size and math.prod(factors[dim + 1 :]) == stride


def _moved(part: MatrixPart, news: Sequence[tuple[int, ...]]) -> MatrixPart:
    batch, rows, cols = (tuple(new for old in dims for new in news[old]) for dims in (part.batch, part.rows, part.cols))
    narrow = part.narrow and (news[part.narrow[0]][0], *part.narrow[1:])
    return MatrixPart(part.label, batch, rows, cols, narrow)


def _without(part: MatrixPart, dim: int) -> MatrixPart:
    """A part after a dim is gone that it does not narrow."""

    def kept(dims: Sequence[int]) -> tuple[int, ...]:
        return tuple(each - (each > dim) for each in dims if each != dim)

    narrow = part.narrow and (part.narrow[0] - (part.narrow[0] > dim), *part.narrow[1:])
    return MatrixPart(part.label, kept(part.batch), kept(part.rows), kept(part.cols), narrow)
