"""Small models, gradients and single parameters for tests on one process."""

from typing import Any

import torch

from hp_muon_plugin.config.optimizer import HpMuon, ScalarAdamW
from hp_muon_plugin.layout.spec import ParamSpec, Role, plain_matrix
from hp_muon_plugin.muon import HpMuonOptimizer


def model_of(*layers: torch.nn.Module) -> torch.nn.Sequential:
    model = torch.nn.Sequential(*layers)
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        param.data.copy_(0.3 * torch.randn(param.shape, generator=generator) + (param.dim() == 1))
    return model


def set_grads(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def single(
    shape: tuple[int, ...], *, view: Any = None, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[torch.nn.Parameter, HpMuonOptimizer]:
    """One Muon parameter and its optimizer, which does not clip."""
    torch.manual_seed(1)
    param = torch.nn.Parameter(torch.randn(shape).to(dtype))
    spec = ParamSpec("w", Role.matrix, shape, view=view or plain_matrix(*shape))
    config = HpMuon(**({"adamw": ScalarAdamW(lr=1e-3), "clip_grad": 0.0} | options))
    return param, HpMuonOptimizer([{"params": [param], "algorithm": "muon"}], {param: spec}, config)
