"""Everything of the iteration that does not depend on where the input lies, built once per set of shapes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from hp_muon_plugin.muon.coefficients import Coefficients
from hp_muon_plugin.muon.products import Operation, Products
from hp_muon_plugin.muon.small_matrices import Normalizer, RunProgram, SmallMatrices
from hp_muon_plugin.muon.workspace import Workspace

Runs = tuple[tuple[Coefficients, ...], ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Operations on fixed buffers for one set of shapes.

    Attributes:
        clear: Zeroes the Gram buffer, if smaller matrices are padded in it.
        gram: Slice of the Gram buffer of each stack.
        normalizer: Of the first run.
        first: From the first Gram matrices to the factors of the first run.
        first_q: The part of each stack in these factors.
        carried: Receives each stack after the first run; empty if there is only one.
        rest: Everything after that, up to the factors of the last run.
        last: Each stack before the last run, or empty if there is only one.
        q: The part of each stack in the factors of the last run.
        program: The last run.
    """

    clear: tuple[Operation, ...]
    gram: list[torch.Tensor]
    normalizer: Normalizer
    first: tuple[Operation, ...]
    first_q: list[torch.Tensor]
    carried: list[torch.Tensor]
    rest: tuple[Operation, ...]
    last: list[torch.Tensor]
    q: list[torch.Tensor]
    program: RunProgram


def prepare(
    shapes: Sequence[torch.Size], runs: Runs, products: Products, workspace: Workspace, dtype: torch.dtype
) -> Prepared:
    """Build the operations for stacks of some shapes.

    Args:
        shapes: ``(B_i, M_i, N_i)`` of each stack.
        runs: The steps of each run.
        products: How products are computed.
        workspace: Where buffers come from.
        dtype: Type of all of them.

    Returns:
        The operations.
    """
    counts, sides = [shape[0] for shape in shapes], [min(shape[1:]) for shape in shapes]
    longest_run = max(len(run) for run in runs)
    small = SmallMatrices(sum(counts), max(sides), products, workspace, dtype, longest_run=longest_run)
    clear = (Operation(small.gram.zero_),) if min(sides) < max(sides) else ()

    gram = _pieces(small.gram, shapes)
    programs = [small.run_program(run, is_first=index == 0) for index, run in enumerate(runs)]
    groups = _groups(shapes)  # from the second run on, stacks of one shape are one
    carried = [
        [workspace.take(f"carry{index % 2}.{position}", group, dtype) for position, group in enumerate(groups)]
        for index in range(len(runs) - 1)
    ]
    rest: list[Operation] = []
    for index, program in enumerate(programs[1:]):
        rest += clear
        for x, piece in zip(carried[index], _pieces(small.gram, groups), strict=True):
            rest += products.gram(x, piece)
        rest += program.operations
        if index + 1 < len(carried):
            rest += [
                applied(x, q, out, identity=program.identity)
                for x, q, out in zip(carried[index], _pieces(program.q, groups), carried[index + 1], strict=True)
            ]
    return Prepared(
        clear,
        gram,
        small.normalizer,
        programs[0].operations,
        _pieces(programs[0].q, shapes),
        _parts(carried[0], shapes) if carried else [],
        tuple(rest),
        _parts(carried[-1], shapes) if carried else [],
        _pieces(programs[-1].q, shapes),
        programs[-1],
    )


_Shape = tuple[int, int, int]


def _groups(shapes: Sequence[torch.Size]) -> list[_Shape]:
    """Neighbouring stacks of the same matrices, as one shape."""
    runs = [(shape, sum(other[0] for other in run)) for shape, run in groupby(shapes, key=lambda shape: shape[1:])]
    return [(count, shape[0], shape[1]) for shape, count in runs]


def _pieces(whole: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The small matrices of each stack."""
    parts = whole.split([shape[0] for shape in shapes])
    return [part[:, : min(shape[1:]), : min(shape[1:])] for part, shape in zip(parts, shapes, strict=True)]


def _parts(groups: Sequence[torch.Tensor], shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """Each stack's part of the groups."""
    left = iter(shapes)
    parts = []
    for group in groups:
        start = 0
        while start < group.shape[0]:
            count = next(left)[0]
            parts.append(group[start : start + count])
            start += count
    return parts


def applied(x: torch.Tensor, q: torch.Tensor, out: torch.Tensor, *, identity: float) -> Operation:
    """``out = (identity I + Q) X``, for tall matrices ``X (identity I + Q)^T``.

    Args:
        x: ``(B, M, N)``.
        q: ``(B, m, m)``.
        out: ``(B, M, N)``, not ``x``.
        identity: See :class:`RunProgram`.

    Returns:
        The operation.
    """
    left, right = (q, x) if x.shape[1] <= x.shape[2] else (x, q.mT)
    if identity == 0.0:
        return Operation(torch.bmm, left, right, out=out)
    return Operation(torch.baddbmm, x, left, right, beta=identity, out=out)
