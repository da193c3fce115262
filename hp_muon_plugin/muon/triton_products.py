"""Symmetric products on CUDA by one Triton kernel: half the tiles, each written twice.

Not run on hardware: the kernel is tested in Triton's interpreter. On a GPU, ``hp-muon bench
newton-schulz --device cuda --calibrate`` finds out where it pays.
"""

import torch
import triton
import triton.language as tl

from hp_muon_plugin.muon.products import Operation

_SMALL_SIDE = 256


@triton.jit  # type: ignore[untyped-decorator]
def _symmetric_kernel(  # type: ignore[no-untyped-def]
    left,
    right,
    addend,
    out,
    side,
    inner,
    factor,
    alpha,
    left_b,
    left_m,
    left_k,
    right_b,
    right_k,
    right_m,
    addend_b,
    addend_m,
    addend_n,
    out_b,
    out_m,
    out_n,
    HAS_ADDEND: tl.constexpr,
    TILE: tl.constexpr,
    INNER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of the lower triangle of ``out = factor * addend + alpha * left right``, and its mirror."""
    place, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    # place counts the tiles of the lower triangle row by row: row r starts at r (r + 1) / 2
    row = ((tl.sqrt(8.0 * place.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    row += ((row + 1) * (row + 2) // 2 <= place).to(tl.int32)  # the root may be one off
    row -= (row * (row + 1) // 2 > place).to(tl.int32)
    col = place - row * (row + 1) // 2
    rows, cols = row * TILE + tl.arange(0, TILE), col * TILE + tl.arange(0, TILE)
    steps = tl.arange(0, INNER)
    left += batch * left_b + rows[:, None] * left_m + steps[None, :] * left_k
    right += batch * right_b + steps[:, None] * right_k + cols[None, :] * right_m
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, inner, INNER):
        inside = steps + start < inner
        a = tl.load(left, mask=(rows[:, None] < side) & inside[None, :], other=0.0)
        b = tl.load(right, mask=inside[:, None] & (cols[None, :] < side), other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        left += INNER * left_k
        right += INNER * right_k
    total *= alpha
    mask = (rows[:, None] < side) & (cols[None, :] < side)
    if HAS_ADDEND:
        addend += batch * addend_b + rows[:, None] * addend_m + cols[None, :] * addend_n
        total += factor * tl.load(addend, mask=mask, other=0.0).to(tl.float32)
    if row == col:  # rounding differs on both sides of the diagonal
        total = 0.5 * (total + tl.trans(total))
    out += batch * out_b
    result = total.to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * out_m + cols[None, :] * out_n, result, mask=mask)
    if row != col:
        tl.store(out + cols[:, None] * out_m + rows[None, :] * out_n, tl.trans(result), mask=tl.trans(mask))


def symmetric_product(
    left: torch.Tensor,
    right: torch.Tensor,
    out: torch.Tensor,
    *,
    addend: torch.Tensor | None = None,
    factor: float = 0.0,
    alpha: float = 1.0,
) -> None:
    """``out = factor * addend + alpha * left right``, where the result is symmetric.

    Args:
        left: ``(B, m, k)`` float32, float16 or bfloat16, any strides.
        right: ``(B, k, m)`` of the same type, any strides.
        out: ``(B, m, m)`` of the same type; overlaps no input.
        addend: ``(B, m, m)`` symmetric, or None.
        factor: Of the addend.
        alpha: Of the product. Sums are kept in float32.
    """
    batch, side, inner = left.shape
    tile = 64 if side <= _SMALL_SIDE else 128
    tiles = triton.cdiv(side, tile)
    given = out if addend is None else addend
    _symmetric_kernel[(tiles * (tiles + 1) // 2, batch)](
        left, right, given, out, side, inner, factor, alpha,
        *left.stride(), *right.stride(), *given.stride(), *out.stride(),
        HAS_ADDEND=addend is not None, TILE=tile, INNER=32 if left.dtype is torch.float32 else 64,
        PRECISION="ieee", num_warps=4 if tile == 64 else 8,
    )  # fmt: skip


class TritonProducts:
    """See :class:`hp_muon_plugin.muon.products.Products`; one kernel per product."""

    is_mirroring = False
    turns_tall = False

    def gram(self, x: torch.Tensor, out: torch.Tensor) -> list[Operation]:
        """See :class:`Products`."""
        y = x if x.shape[1] == out.shape[1] else x.mT
        return [Operation(symmetric_product, y, y.mT, out)]

    def square(self, r: torch.Tensor, *, linear: float, quadratic: float, out: torch.Tensor) -> list[Operation]:
        """See :class:`Products`."""
        return [Operation(symmetric_product, r, r, out, addend=r, factor=linear, alpha=quadratic)]

    def product(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        addend: torch.Tensor,
        *,
        factor: float,
        out: torch.Tensor,
        is_mirrored: bool = True,
    ) -> list[Operation]:
        """See :class:`Products`."""
        if not is_mirrored:
            return [Operation(torch.baddbmm, addend, left, right, beta=factor, out=out)]
        return [Operation(symmetric_product, left, right, out, addend=addend, factor=factor)]
