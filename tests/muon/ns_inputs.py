"""Matrices that Newton-Schulz is judged on, and two peers' iterations."""

import torch

from hp_muon_plugin.muon.coefficients import Coefficients
from hp_muon_plugin.muon.reference import reference_newton_schulz


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_singular_values(values: torch.Tensor, rows: int, cols: int, seed: int) -> torch.Tensor:
    short = min(rows, cols)
    u = torch.linalg.qr(gaussian(rows, short, seed=seed).double())[0]
    v = torch.linalg.qr(gaussian(cols, short, seed=seed + 1).double())[0]
    return ((u * values.double()) @ v.mT).float()


def judged_matrices(rows: int, cols: int) -> dict[str, torch.Tensor]:
    short = min(rows, cols)
    places = torch.linspace(0, 1, short)
    found = {"gaussian": gaussian(rows, cols)}
    for exponent in (2, 4, 8):
        found[f"cond1e{exponent}"] = with_singular_values(10.0 ** (-exponent * places), rows, cols, exponent)
    found["powerlaw"] = with_singular_values(1.0 / torch.arange(1, short + 1), rows, cols, 20)
    low = gaussian(rows, 4, seed=30) @ gaussian(4, cols, seed=31)
    found["lowrank_noise"] = low / low.norm() + 1e-3 * gaussian(rows, cols, seed=32) / (rows * cols) ** 0.5
    for rank in (1, 4):
        found[f"rank{rank}"] = gaussian(rows, rank, seed=40 + rank) @ gaussian(rank, cols, seed=50 + rank)
    return found


def torch_muon(x: torch.Tensor) -> torch.Tensor:
    """torch.optim.Muon's own function, in its bfloat16."""
    from torch.optim._muon import _zeropower_via_newtonschulz

    return _zeropower_via_newtonschulz(x, (3.4445, -4.7750, 2.0315), 5, 1e-7).float()


def standard_float32(x: torch.Tensor, coefficients: tuple[Coefficients, ...]) -> torch.Tensor:
    """The plain float32 iteration, matrix by matrix."""
    if x.shape[0] > x.shape[1]:
        return standard_float32(x.mT, coefficients).mT
    x = x / x.norm()
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def errors(got: torch.Tensor, x: torch.Tensor, coefficients: tuple[Coefficients, ...]) -> tuple[float, float]:
    """Relative Frobenius and absolute spectral error against the float64 iteration."""
    wanted = reference_newton_schulz(x, coefficients)
    difference = got.double() - wanted
    return float(difference.norm() / wanted.norm()), float(torch.linalg.matrix_norm(difference, 2))
