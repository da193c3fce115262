"""What one parameter is: role, global shape, how it reads as matrices, how ranks share it.

A spec is pure data, the same on every rank, and fixed before step 0. It knows nothing of tensors,
process groups or Megatron; adapters write specs, and planning, Muon and checkpoints read them.
"""

import math
from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a parameter does in the model. The default optimizer follows from it: muon/routing.py."""

    embedding = "embedding"
    output = "output"
    router = "router"
    norm = "norm"
    bias = "bias"
    vector = "vector"
    conv = "conv"
    fused_unknown = "fused_unknown"
    attention_qkv = "attention_qkv"
    attention_output = "attention_output"
    latent_projection = "latent_projection"
    mlp_first = "mlp_first"
    mlp_second = "mlp_second"
    expert_first = "expert_first"
    expert_second = "expert_second"
    matrix = "matrix"


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """One family of equal matrices inside a parameter that is reshaped to ``factors``.

    Attributes:
        label: What the matrices are, for tables: ``q``, ``k``, ``gate``; empty for the only part.
        batch: Dims of the factored shape that number the matrices.
        rows: Dims that make up the rows, outermost first.
        cols: Dims that make up the columns, outermost first.
        narrow: ``(dim, start, length)`` of the slice that belongs to this part, or None for all.
    """

    label: str
    batch: tuple[int, ...]
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    narrow: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class MatrixView:
    """How a whole parameter reads as matrices. The parts cover every element exactly once.

    Attributes:
        factors: Shape with the same elements in the same order as the parameter.
        parts: Families of matrices in it.
    """

    factors: tuple[int, ...]
    parts: tuple[MatrixPart, ...]

    def part_shape(self, part: MatrixPart) -> tuple[int, int, int]:
        """``(count, rows, cols)`` of the matrices of one part.

        Args:
            part: One of ``self.parts``.

        Returns:
            Number of matrices, rows and columns of each.
        """
        sizes = list(self.factors)
        if part.narrow is not None:
            dim, _, length = part.narrow
            sizes[dim] = length
        count, rows, cols = (math.prod(sizes[dim] for dim in dims) for dims in (part.batch, part.rows, part.cols))
        return count, rows, cols

    def check(self, numel: int) -> None:
        """Assert that the parts cover ``numel`` elements once each.

        Args:
            numel: Elements of the parameter.
        """
        assert math.prod(self.factors) == numel, (self.factors, numel)
        covered = 0
        for part in self.parts:
            assert sorted((*part.batch, *part.rows, *part.cols)) == list(range(len(self.factors))), part
            covered += math.prod(self.part_shape(part))
        assert covered == numel, (self, numel)


@dataclass(frozen=True, slots=True)
class AxisSplit:
    """A parameter is cut evenly over the ranks of one mesh axis.

    Attributes:
        axis: ``tp`` or ``etp``.
        size: Ranks on the axis.
        factors: Shape of the whole parameter in which the cut runs along one dim. A gated first
            MLP layer, whose ranks hold ``[gate_r; up_r]``, has ``(2, ffn, hidden)`` here.
        dim: The dim of ``factors`` that is cut.
    """

    axis: str
    size: int
    factors: tuple[int, ...]
    dim: int

    def local_factors(self) -> tuple[int, ...]:
        """``factors`` of the part that one rank holds."""
        sizes = list(self.factors)
        assert sizes[self.dim] % self.size == 0, self
        sizes[self.dim] //= self.size
        return tuple(sizes)


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter of the whole model.

    Attributes:
        name: Canonical name: global layer and expert numbers, no wrapper prefixes.
        role: What it does.
        shape: Shape of the whole parameter, before any rank takes its part.
        view: How it reads as matrices; None for what has no matrix (biases, norms).
        split: How tensor-parallel ranks share it; None if each holds the whole.
        is_expert: Whether it belongs to one of several routed experts, so that its gradient is
            averaged over the expert-data-parallel ranks only.
        trainable: False for frozen parameters.
        note: Why the adapter chose this role, where the name alone does not say.
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    view: MatrixView | None = None
    split: AxisSplit | None = None
    is_expert: bool = False
    trainable: bool = True
    note: str = ""

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def local_numel(self) -> int:
        """Elements that one tensor-parallel rank holds."""
        return self.numel if self.split is None else math.prod(self.split.local_factors())


def plain_matrix(rows: int, cols: int) -> MatrixView:
    """The view of an ordinary 2-D weight.

    Args:
        rows: Output size.
        cols: Input size.

    Returns:
        A view with one matrix.
    """
    return MatrixView((rows, cols), (MatrixPart("", (), (0,), (1,)),))


def stacked_matrices(count: int, rows: int, cols: int, *, label: str = "") -> MatrixView:
    """The view of ``[count, rows, cols]``, or of anything with these elements in this order.

    Args:
        count: Number of matrices, for example experts or heads.
        rows: Rows of each.
        cols: Columns of each.
        label: What they are.

    Returns:
        A view with one part of ``count`` matrices.
    """
    return MatrixView((count, rows, cols), (MatrixPart(label, (0,), (1,), (2,)),))
