"""Peers of the Newton-Schulz benchmark: what others run, called or written as they run it."""

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence

import torch

from hp_muon_plugin.bench.ns_cases import Matrices

Peer = Callable[[Matrices], Sequence[torch.Tensor]]
_KELLER = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_EPS = 1e-7


def peers() -> dict[str, Peer]:
    """Peers that are installed here.

    Returns:
        By name: functions from matrices of one shape to their polar factors, five Keller steps.
    """
    found: dict[str, Peer] = {}
    if importlib.util.find_spec("torch.optim._muon") is not None:
        found["torch.optim.Muon (bf16)"] = torch_muon
    if importlib.util.find_spec("emerging_optimizers") is not None:
        found["emerging-optimizers (fp32)"] = lambda xs: emerging(xs, "highest")
        found["emerging-optimizers (bf16)"] = lambda xs: emerging(xs, "medium")
    found["loop (fp32)"] = loop
    found["stacked (bf16)"] = lambda xs: stacked(xs, torch.bfloat16)
    found["stacked, cast first (bf16)"] = lambda xs: stacked(xs, torch.bfloat16, is_cast_first=True)
    found["stacked (fp32)"] = lambda xs: stacked(xs, torch.float32)
    return found


def torch_muon(xs: Matrices) -> Sequence[torch.Tensor]:
    """The function that ``torch.optim.Muon`` calls for each parameter."""
    polar = importlib.import_module("torch.optim._muon")._zeropower_via_newtonschulz
    return [polar(x, _KELLER, _STEPS, _EPS) for x in xs.each]


def emerging(xs: Matrices, precision: str) -> Sequence[torch.Tensor]:
    """NVIDIA's emerging-optimizers: a tensor of matrices at once, or one by one."""
    polar = importlib.import_module("emerging_optimizers.orthogonalized_optimizers.muon_utils").newton_schulz
    with _float32_precision(precision):
        if xs.whole is not None:
            return list(polar(xs.whole, _STEPS, "simple"))
        return [polar(x, _STEPS, "simple") for x in xs.each]


def loop(xs: Matrices) -> Sequence[torch.Tensor]:
    """The plain iteration in float32, matrix by matrix."""
    return [_iterate_one(x) for x in xs.each]


def stacked(xs: Matrices, dtype: torch.dtype, *, is_cast_first: bool = False) -> Sequence[torch.Tensor]:
    """The fused form of the mission's documents: matrices of one shape stacked, batched products.

    It normalises in the type of the input, or after the cast, which is faster and less accurate.
    """
    whole = torch.stack(xs.each) if xs.whole is None else xs.whole
    return list(_iterate(whole, dtype, is_cast_first=is_cast_first))


def _iterate(x: torch.Tensor, dtype: torch.dtype, *, is_cast_first: bool) -> torch.Tensor:
    is_tall = x.shape[1] > x.shape[2]
    y = x.mT if is_tall else x
    y = y.to(dtype) if is_cast_first else y
    y = (y / (y.norm(dim=(-2, -1), keepdim=True) + _EPS)).to(dtype)
    a, b, c = _KELLER
    for _ in range(_STEPS):
        gram = y @ y.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        y = torch.baddbmm(y, polynomial, y, beta=a)
    return y.mT if is_tall else y


def _iterate_one(x: torch.Tensor) -> torch.Tensor:
    is_tall = x.shape[0] > x.shape[1]
    y = x.mT if is_tall else x
    y = y / (y.norm() + _EPS)
    a, b, c = _KELLER
    for _ in range(_STEPS):
        gram = y @ y.mT
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        y = torch.addmm(y, polynomial, y, beta=a)
    return y.mT if is_tall else y


@contextlib.contextmanager
def _float32_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
