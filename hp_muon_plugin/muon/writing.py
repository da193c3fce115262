"""The last product of the iteration: into the target, or through a buffer where types or strides forbid it."""

import torch

from hp_muon_plugin.muon.stack import Target
from hp_muon_plugin.muon.workspace import Workspace


def write(target: Target, x: torch.Tensor, q: torch.Tensor, identity: float, workspace: Workspace) -> None:
    """``tensor <- keep * tensor + scale * (identity I + Q) X``.

    Args:
        target: Where to.
        x: ``(B, M, N)`` of the whole stack, before the last run.
        q: ``(B, m, m)``, the factors of the last run.
        identity: What is missing on their diagonal.
        workspace: Where a buffer comes from.
    """
    left, right, addend = target.factors(x, q)
    out = target.tensor
    if out.dtype is not x.dtype:
        product = workspace.take("product", tuple(out.shape), x.dtype)
        torch.baddbmm(addend, left, right, beta=identity * target.scale, alpha=target.scale, out=product)
        _store(target, product)
        return
    beta = identity * target.scale
    if beta == 0.0:
        addend, beta = out, target.keep
    if beta == 0.0 and target.scale == 1.0:
        torch.bmm(left, right, out=out)  # the same, with less around it
        return
    torch.baddbmm(addend, left, right, beta=beta, alpha=target.scale, out=out)


def write_turned(target: Target, x: torch.Tensor, q: torch.Tensor, identity: float, workspace: Workspace) -> None:
    """The same for tall matrices that were read as wide ones.

    Args:
        target: Where to.
        x: ``(B, N, M)`` of the whole stack, before the last run.
        q: ``(B, N, N)``, the factors of the last run.
        identity: What is missing on their diagonal.
        workspace: Where a buffer comes from.
    """
    x, q = target.chosen(x, q)
    product = workspace.take("product", tuple(x.shape), x.dtype)
    torch.baddbmm(x, q, x, beta=identity * target.scale, alpha=target.scale, out=product)
    result, blocks = product.mT, target.tensor.shape[0]
    _store(target, result if blocks == target.count else result[0].unflatten(0, (blocks, -1)))


def _store(target: Target, product: torch.Tensor) -> None:
    if target.keep == 0.0:
        target.tensor.copy_(product)
    else:
        target.tensor.mul_(target.keep).add_(product)
