"""Everything of the iteration that does not depend on where the input lies, built once per set of shapes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from hp_muon_plugin.muon.coefficients import Coefficients
from hp_muon_plugin.muon.gathering import Place
from hp_muon_plugin.muon.products import Operation, Products
from hp_muon_plugin.muon.small_matrices import Normalizer, RunProgram, SmallMatrices
from hp_muon_plugin.muon.workspace import Workspace

# With three runs the second of the buffers between them is free while the first run reads the input.
_RUNS_WITH_ROOM = 3

Runs = tuple[tuple[Coefficients, ...], ...]


_Shape = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Operations on fixed buffers for one set of shapes.

    An *input* is a stack, or neighbouring stacks of one shape that are copied into one.

    Attributes:
        places: How the stacks become inputs; empty if each is one.
        clear: Zeroes the Gram buffer, if smaller matrices are padded in it.
        gram: Slice of the Gram buffer of each input.
        normalizer: Of the first run.
        first: From the first Gram matrices and their traces to the factors of the first run.
        first_q: The part of each input in these factors.
        carried: Receives each input after the first run; empty if there is only one.
        rest: Everything after that, up to the factors of the last run.
        last: Each stack before the last run, or empty if there is only one.
        q: The part of each stack in the factors of the last run.
        program: The last run.
    """

    places: list[Place]
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
    shapes: Sequence[torch.Size],
    are_gathered: Sequence[bool],
    runs: Runs,
    products: Products,
    workspace: Workspace,
    dtype: torch.dtype,
) -> Prepared:
    """Build the operations for stacks of some shapes.

    Args:
        shapes: ``(B_i, M_i, N_i)`` of each stack.
        are_gathered: Whether it pays to copy neighbours of each shape into one.
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
    groups = _groups(shapes)  # from the second run on, stacks of one shape are one
    is_any_gathered = len(runs) >= _RUNS_WITH_ROOM and any(are_gathered)
    places = _places(shapes, are_gathered, workspace, dtype) if is_any_gathered else []
    inputs = _inputs(shapes, places)

    grams = [small.gram] * len(runs)
    if len(runs) > 1 and longest_run == 1 and len(groups) == 1 and groups[0][1] == groups[0][2]:
        grams = [small.two_grams()[index % 2] for index in range(len(runs))]
        carried = [[buffer] for buffer in grams[:-1]]
    else:
        carried = [
            [workspace.take(f"carry{index % 2}.{position}", group, dtype) for position, group in enumerate(groups)]
            for index in range(len(runs) - 1)
        ]
    programs = [small.run_program(run, is_first=i == 0, gram=grams[i]) for i, run in enumerate(runs)]
    rest: list[Operation] = []
    for index, program in enumerate(programs[1:]):
        rest += clear
        for x, piece in zip(carried[index], _pieces(grams[index + 1], groups), strict=True):
            rest += products.gram(x, piece)
        rest += program.operations
        if index + 1 < len(carried):
            rest += [
                applied(x, q, out, identity=program.identity)
                for x, q, out in zip(carried[index], _pieces(program.q, groups), carried[index + 1], strict=True)
            ]
    if places:
        wholes = zip(groups, carried[-1], carried[-2], _pieces(programs[-1].q, groups), strict=True)
        places = list(_returning(places, shapes, wholes))
    return Prepared(
        places,
        clear,
        _pieces(small.gram, inputs),
        small.normalizer,
        (*small.normalizer.divide, *programs[0].operations),
        _pieces(programs[0].q, inputs),
        _parts(carried[0], inputs) if carried else [],
        tuple(rest),
        _parts(carried[-1], shapes) if carried else [],
        _pieces(programs[-1].q, shapes),
        programs[-1],
    )


def _places(
    shapes: Sequence[torch.Size], are_gathered: Sequence[bool], workspace: Workspace, dtype: torch.dtype
) -> list[Place]:
    """Where neighbours are copied to: buffers that hold nothing before the second run is applied."""
    places: list[Place] = []
    first = 0
    for position, (shape, run) in enumerate(groupby(shapes, key=lambda shape: shape[1:])):
        counts = [other[0] for other in run]
        if are_gathered[first]:
            whole = workspace.take(f"carry1.{position}", (sum(counts), *shape), dtype)
            places.append(Place(len(counts), whole))
        else:
            places += [Place()] * len(counts)
        first += len(counts)
    return places


def _returning(
    places: Sequence[Place],
    shapes: Sequence[torch.Size],
    wholes: Iterable[tuple[_Shape, torch.Tensor, torch.Tensor, torch.Tensor]],
) -> Iterator[Place]:
    """Places with their last products, into buffers that hold nothing when the last run is applied."""
    by_group, first = iter(wholes), 0
    left = 0  # matrices of the current group that have no place yet
    for place in places:
        members = shapes[first : first + place.count]
        first += place.count
        if left == 0:
            group, x, result, q = next(by_group)
            left = group[0]
        left -= sum(shape[0] for shape in members)
        if place.whole is None:
            yield place
            continue
        factors = (q, x) if group[1] <= group[2] else (x, q.mT)
        yield Place(place.count, place.whole, factors, result, result.split([shape[0] for shape in members]))


def _inputs(shapes: Sequence[torch.Size], places: Sequence[Place]) -> Sequence[Sequence[int]]:
    """Shapes of the inputs."""
    left = iter(shapes)
    inputs = []
    for place in places:
        members = [next(left) for _ in range(place.count)]
        inputs.append((sum(shape[0] for shape in members), *members[0][1:]))
    return inputs or shapes


def _groups(shapes: Sequence[torch.Size]) -> list[_Shape]:
    """Neighbouring stacks of the same matrices, as one shape."""
    runs = [(shape, sum(other[0] for other in run)) for shape, run in groupby(shapes, key=lambda shape: shape[1:])]
    return [(count, shape[0], shape[1]) for shape, count in runs]


def _pieces(whole: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The small matrices of each stack."""
    parts = whole.split([shape[0] for shape in shapes])
    return [part[:, : min(shape[1:]), : min(shape[1:])] for part, shape in zip(parts, shapes, strict=True)]


def _parts(groups: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
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
