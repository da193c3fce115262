"""Matrices that are orthogonalised at once: by short side, algorithm and shape."""

from collections.abc import Sequence
from dataclasses import dataclass

from hp_muon_plugin.config.choices import FloatDtype
from hp_muon_plugin.layout.cut import Cut
from hp_muon_plugin.muon.algorithm import Algorithm, Form, Rule, choose, padded_short

FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """The matrices of one part of one piece.

    Attributes:
        piece: Index into ``MuonPlan.pieces``.
        part: Index into the piece's ``spec.view.parts``.
        count: Number of matrices.
        rows: Rows of each, of the rank's slice where it is cut.
        cols: Columns of each, likewise.
        scale: Factor of the update, from the logical shape.
        cut: Side that ranks divide and never gather.
    """

    piece: int
    part: int
    count: int
    rows: int
    cols: int
    scale: float
    cut: Cut = Cut.none

    @property
    def gram_side(self) -> int:
        """Side of their Gram matrices."""
        return _sides(self.rows, self.cols, self.cut)[0]


@dataclass(frozen=True, slots=True)
class Family:
    """Matrices of one shape, side by side in one buffer.

    Attributes:
        rows: Rows of each.
        cols: Columns of each.
        parts: What is in it, in buffer order.
        cut: As for the parts.
    """

    rows: int
    cols: int
    parts: tuple[PlannedPart, ...]
    cut: Cut = Cut.none

    @property
    def count(self) -> int:
        """Matrices."""
        return sum(part.count for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, float32."""
        return FLOAT_BYTES * self.count * self.rows * self.cols

    @property
    def sides(self) -> tuple[int, int]:
        """Side of the Gram matrices, and the other one."""
        return _sides(self.rows, self.cols, self.cut)


@dataclass(frozen=True, slots=True)
class FusedBatch:
    """Matrices orthogonalised at once: long sides, wide and tall mixed.

    Attributes:
        short: Side of their Gram matrices, or the side to which smaller ones are padded.
        algorithm: How.
        families: By shape.
        owner: Place on the stage's axis of the rank that does it; None for all of them.
    """

    short: int
    algorithm: Algorithm
    families: tuple[Family, ...]
    owner: int | None = None

    @property
    def count(self) -> int:
        """Matrices in the batch."""
        return sum(family.count for family in self.families)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices, float32."""
        return sum(family.nbytes for family in self.families)

    def flops(self, run_lengths: Sequence[int]) -> int:
        """Floating-point operations of one rank that takes part.

        Args:
            run_lengths: Steps of each run of the batch's algorithm.

        Returns:
            The sum over all matrices. Where slices are never gathered, forming the Gram matrix and
            applying the factor cost the slice, the small products the same on every rank.
        """
        return sum(
            family.count * self.algorithm.flops(*family.sides, run_lengths, padded=self.short)
            for family in self.families
        )


def fused_batches(
    parts: Sequence[PlannedPart],
    device: str,
    table: Sequence[Rule],
    limit: int,
    dtype: FloatDtype | None,
    *,
    owner: int | None = None,
) -> list[FusedBatch]:
    """Group matrices into batches.

    Args:
        parts: What to orthogonalise; all of them whole, or all of them cut.
        device: ``cpu``, ``cuda`` or ``npu``.
        table: Which algorithm is fastest for which shape.
        limit: Largest size of the matrices of a batch in bytes; one larger part is a batch of its own.
        dtype: Type of the products, or None for what the table says.
        owner: The rank that does it.

    Returns:
        Batches by short side.
    """
    groups: dict[tuple[int, Algorithm], list[PlannedPart]] = {}
    for part in parts:
        short, long = _sides(part.rows, part.cols, part.cut)
        if part.cut is Cut.none:
            algorithm = choose(device, short, long, table=table, dtype=dtype)
            short = padded_short(device, algorithm, short, long)
        else:
            algorithm = gram_algorithm(device, short, table)
        groups.setdefault((short, algorithm), []).append(part)
    batches = []
    for (short, algorithm), members in sorted(groups.items(), key=lambda item: (item[0][0], str(item[0][1]))):
        members.sort(key=lambda part: (part.rows, part.cols, part.cut))
        taken: list[PlannedPart] = []
        for part in members:
            if taken and FLOAT_BYTES * sum(p.count * p.rows * p.cols for p in (*taken, part)) > limit:
                batches.append(_fused(short, algorithm, taken, owner))
                taken = []
            taken.append(part)
        batches.append(_fused(short, algorithm, taken, owner))
    return batches


def gram_algorithm(device: str, side: int, table: Sequence[Rule]) -> Algorithm:
    """How Gram matrices that are summed over ranks are iterated: in float32, runs as long as that allows.

    Args:
        device: ``cpu``, ``cuda`` or ``npu``.
        side: Their side.
        table: Which algorithm is fastest for which shape.

    Returns:
        The Gram form, with as many block rows as the table has for float32 matrices of this side.
    """
    found = choose(device, side, side, table=table)
    if found.dtype is not FloatDtype.float32:
        return Algorithm(Form.gram)
    return Algorithm(Form.gram, found.num_blocks, shared_blocks=found.shared_blocks)


def _sides(rows: int, cols: int, cut: Cut) -> tuple[int, int]:
    if cut is Cut.none:
        return min(rows, cols), max(rows, cols)
    return (cols, rows) if cut is Cut.rows else (rows, cols)


def _fused(short: int, algorithm: Algorithm, parts: Sequence[PlannedPart], owner: int | None) -> FusedBatch:
    shapes = sorted({(part.rows, part.cols, part.cut) for part in parts})
    families = [
        Family(rows, cols, tuple(p for p in parts if (p.rows, p.cols, p.cut) == (rows, cols, cut)), cut)
        for rows, cols, cut in shapes
    ]
    return FusedBatch(short, algorithm, tuple(families), owner)
