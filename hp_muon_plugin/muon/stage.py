"""A stage of a step: pieces that are orthogonalised together in one way, and what that sends."""

from dataclasses import dataclass

from hp_muon_plugin.muon.batches import FLOAT_BYTES, FusedBatch
from hp_muon_plugin.muon.pieces import Way
from hp_muon_plugin.platform.kinds import Collective


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """Equal collectives of a stage.

    Attributes:
        kind: Which.
        num_calls: How many.
        received_bytes: What one rank receives from the others in all of them.
    """

    kind: Collective
    num_calls: int
    received_bytes: int


@dataclass(frozen=True, slots=True)
class Stage:
    """Pieces that are orthogonalised together, and their batches.

    Attributes:
        way: How.
        axis: Mesh axis of its collectives, or None where there are none.
        size: Ranks on the axis (1 without an axis).
        pieces: Indices into ``MuonPlan.pieces``, in the order of the message.
        numels: Elements of each piece that one rank holds.
        batches: Fused batches.
        owners: Of each piece the place on the axis of the rank that orthogonalises it (``owner`` only).
        num_runs: How often Gram matrices are summed (``gram`` only).
    """

    way: Way
    axis: str | None
    size: int
    pieces: tuple[int, ...]
    numels: tuple[int, ...]
    batches: tuple[FusedBatch, ...]
    owners: tuple[int, ...] = ()
    num_runs: int = 1

    @property
    def local_numel(self) -> int:
        """Elements of all pieces that one rank holds."""
        return sum(self.numels)

    def batches_of(self, index: int) -> list[FusedBatch]:
        """What one rank works on.

        Args:
            index: Its place on the axis.

        Returns:
            Its batches.
        """
        return [batch for batch in self.batches if batch.owner in (None, index)]

    def collectives(self, index: int = 0) -> list[PlannedCollective]:
        """What is sent, in float32 (and int32 exponents).

        With ``p`` ranks on the axis, ``L`` elements of all pieces on one rank, ``O`` of them of pieces
        that this rank owns, and ``B`` matrices with Gram matrices of side ``m``, a rank receives

        * ``gather``: ``4 (p - 1) L`` in one all-gather;
        * ``gram``: ``4 (p - 1) B`` in one all-gather of exponents, and ``8 (p - 1) / p sum(m^2)`` in one
          all-reduce for each run of the iteration (one under most schedules);
        * ``owner``: ``4 (p - 1) O`` in one all-to-all, and ``4 (L - O)`` in another one back.

        Args:
            index: The rank's place on the axis.

        Returns:
            The collectives in order.
        """
        if self.axis is None or self.size == 1:
            return []
        others, local = self.size - 1, self.local_numel
        if self.way is Way.gram:
            count = sum(batch.count for batch in self.batches)
            squares = sum(batch.count * batch.short**2 for batch in self.batches)
            reduced = self.num_runs * (2 * FLOAT_BYTES * others * squares // self.size)
            return [
                PlannedCollective(Collective.ALL_GATHER, 1, FLOAT_BYTES * others * count),
                PlannedCollective(Collective.ALL_REDUCE, self.num_runs, reduced),
            ]
        if self.way is Way.owner:
            owned = sum(n for n, owner in zip(self.numels, self.owners, strict=True) if owner == index)
            received = FLOAT_BYTES * (others * owned + local - owned)
            return [PlannedCollective(Collective.ALL_TO_ALL, 2, received)]
        return [PlannedCollective(Collective.ALL_GATHER, 1, FLOAT_BYTES * others * local)]

    @property
    def received_bytes(self) -> int:
        """Bytes that a rank receives from the others; the most of any rank."""
        return max(self.received_bytes_of(index) for index in range(self.size))

    def received_bytes_of(self, index: int) -> int:
        """Bytes that one rank receives from the others.

        Args:
            index: Its place on the axis.

        Returns:
            The sum over :meth:`collectives`.
        """
        return sum(collective.received_bytes for collective in self.collectives(index))
