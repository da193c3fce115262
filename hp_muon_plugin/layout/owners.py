"""Which replica updates which parameter, so that every link between replicas carries as much each way.

A sum of gradients flows to the owner, an updated weight flows from it. A link whose owners are all on
one side carries everything in one direction while the other idles, which takes twice as long.
"""

from collections.abc import Sequence

_MOST_TURNS = 2
_MOST_MOVES = 32  # of one group: with more parameters than that, none is large enough to matter
_WORTH = 1.0 / 32  # of a group: moves that even out less are not worth another segment

_Counts = tuple[list[list[int]], list[int]]


class Balance:
    """Elements that each replica owns, on every shard and in all: groups make up for what earlier ones left uneven.

    Args:
        num_owners: Replicas.
        num_shards: Shards of a parameter.
    """

    def __init__(self, num_owners: int, num_shards: int) -> None:
        self._on_shard = [[0] * num_owners for _ in range(num_shards)]
        self._total = [0] * num_owners

    def divide(self, parts: Sequence[dict[int, int]], guess: Sequence[int]) -> list[int]:
        """Choose the owners of a group's parameters, and count what they own.

        Args:
            parts: Of each parameter, elements by shard; shards that hold nothing of it are left out.
            guess: Owners to begin with. Neighbours with one owner are one collective, so few are moved.

        Returns:
            The owner of each parameter. Every rank finds the same: only sizes are looked at.
        """
        before, size = self._copy(), len(self._total)
        found: tuple[int, list[int], _Counts] | None = None
        for turn in range(min(size, _MOST_TURNS)):
            owners = self._even_out(parts, [(owner + turn) % size for owner in guess])
            if found is None or self._squares < found[0]:
                found = self._squares, owners, self._copy()
            self._on_shard, self._total = [list(counts) for counts in before[0]], list(before[1])
        assert found is not None
        self._on_shard, self._total = found[2]
        return found[1]

    def _even_out(self, parts: Sequence[dict[int, int]], owners: list[int]) -> list[int]:
        for part, owner in zip(parts, owners, strict=True):
            self._add(part, owner, 1)
        least_gain = 2.0 * (_WORTH * sum(sum(part.values()) for part in parts)) ** 2
        for _ in range(_MOST_MOVES):
            moves = (
                (self._gain(part, owner, other), -place, other)
                for place, (part, owner) in enumerate(zip(parts, owners, strict=True))
                for other in range(len(self._total))
                if other != owner
            )
            gain, place, other = max(moves, default=(0, 0, 0))
            if gain <= least_gain:
                break
            self._add(parts[-place], owners[-place], -1)
            owners[-place] = other
            self._add(parts[-place], other, 1)
        return owners

    @property
    def _squares(self) -> int:
        """Least where everything is even."""
        return sum(count * count for counts in [*self._on_shard, self._total] for count in counts)

    def _copy(self) -> "_Counts":
        return [list(counts) for counts in self._on_shard], list(self._total)

    def _add(self, part: dict[int, int], owner: int, sign: int) -> None:
        for shard, numel in part.items():
            self._on_shard[shard][owner] += sign * numel
            self._total[owner] += sign * numel

    def _gain(self, part: dict[int, int], owner: int, other: int) -> int:
        """By how much the sum of squares of all counts shrinks if a parameter changes its owner."""
        numel = sum(part.values())
        gain = numel * (self._total[owner] - self._total[other] - numel)
        for shard, held in part.items():
            gain += held * (self._on_shard[shard][owner] - self._on_shard[shard][other] - held)
        return 2 * gain
