"""The first version that everybody writes, which the mission's figures start from."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from hp_muon_plugin.bench.ns_cases import Matrices
from hp_muon_plugin.bench.ns_peers import loop
from hp_muon_plugin.bench.opt_contenders import Contender, Peer, Setting, torch_sharded
from hp_muon_plugin.bench.opt_convention import LEARNING_RATE, MOMENTUM, WEIGHT_DECAY, Convention
from hp_muon_plugin.config.choices import ScaleMode
from hp_muon_plugin.muon.scale import update_scale

NAIVE = "naive gather"


class NaiveMuon(torch.optim.Optimizer):
    """Gathers every update, experts' too, and orthogonalises every matrix by itself on every rank.

    Args:
        model: Under torch's ``fully_shard``.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
            momentum.lerp_(parameter.grad, 1 - MOMENTUM)
            ahead = parameter.grad.lerp(momentum, MOMENTUM)
            whole = ahead.full_tensor()  # shard axis, the whole matrix, every rank waits
            matrices = whole.reshape(-1, *whole.shape[-2:])
            polar = torch.stack(list(loop(Matrices(list(matrices))))).view(whole.shape)
            mesh = parameter.device_mesh
            everywhere = DTensor.from_local(polar, mesh, [Replicate()] * mesh.ndim, run_check=False)
            scale = update_scale(ScaleMode.match_rms_adamw, *whole.shape[-2:])
            parameter.mul_(1 - LEARNING_RATE * WEIGHT_DECAY)
            parameter.sub_(everywhere.redistribute(placements=parameter.placements), alpha=LEARNING_RATE * scale)


def build(setting: Setting) -> Contender:
    """The naive form.

    Args:
        setting: Case and mesh.

    Returns:
        The contender.
    """
    return torch_sharded(setting, NaiveMuon)


PEERS: dict[str, Peer] = {NAIVE: Peer(build, Convention(), "torch", about="written here")}
