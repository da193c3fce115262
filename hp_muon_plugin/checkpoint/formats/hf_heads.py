"""q, k and v apart, as Hugging Face has them, and interleaved by query group, as Megatron has them."""

from dataclasses import dataclass

from hp_muon_plugin.checkpoint import lazy
from hp_muon_plugin.checkpoint.lazy import Lazy
from hp_muon_plugin.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Heads:
    """Shape of the attention.

    Attributes:
        heads: Query heads.
        groups: Key and value heads.
        dim: Rows of a head.
    """

    heads: int
    groups: int
    dim: int

    @property
    def queries(self) -> int:
        """Rows of the query heads of a group."""
        return self.heads // self.groups * self.dim

    @property
    def rows(self) -> int:
        """Rows of the fused weight."""
        return (self.heads + 2 * self.groups) * self.dim


def split(fused: Lazy, heads: Heads, name: str) -> list[Lazy]:
    """q, k and v of a fused weight or bias.

    Args:
        fused: The weight.
        heads: Shape of the attention.
        name: For messages.

    Raises:
        CheckpointError: If its rows are another number.
    """
    if fused.shape[0] != heads.rows:
        raise CheckpointError(
            f"{name} has {fused.shape[0]} rows; {heads.heads} query and {heads.groups} key heads of {heads.dim} need "
            f"{heads.rows}\n  fix: --option num_attention_heads=... --option num_query_groups=..."
        )
    block = heads.queries + 2 * heads.dim
    bounds = ((0, heads.queries), (heads.queries, heads.queries + heads.dim), (heads.queries + heads.dim, block))
    return [
        lazy.rows_of([lazy.cut_rows(fused, group * block + a, group * block + b) for group in range(heads.groups)])
        for a, b in bounds
    ]


def join(parts: list[Lazy], heads: Heads, name: str) -> Lazy:
    """The fused weight or bias of q, k and v.

    Args:
        parts: q, k and v.
        heads: Shape of the attention.
        name: For messages.

    Raises:
        CheckpointError: If their rows are other numbers.
    """
    wanted = (heads.heads * heads.dim, heads.groups * heads.dim, heads.groups * heads.dim)
    if tuple(part.shape[0] for part in parts) != wanted:
        raise CheckpointError(
            f"{name}: q, k and v have {', '.join(str(part.shape[0]) for part in parts)} rows; config.json says "
            f"{', '.join(map(str, wanted))}"
        )
    sizes = (heads.queries, heads.dim, heads.dim)
    return lazy.rows_of(
        [
            lazy.cut_rows(part, group * size, (group + 1) * size)
            for group in range(heads.groups)
            for part, size in zip(parts, sizes, strict=True)
        ]
    )
