"""Initial weights that do not depend on the parallel layout.

megatron-core draws weights from random streams that differ between tensor-, expert- and
pipeline-parallel ranks, so two layouts start from different models. Here every parameter is drawn
whole, from a seed made of the run's seed and its canonical name, and each rank keeps its part.
"""

import hashlib

import torch

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.layout.spec import ParamSpec, Role
from hp_muon_plugin.megatron.groups import megatron_groups
from hp_muon_plugin.megatron.specs import chunk_specs
from hp_muon_plugin.muon.matrix_view import local_slice


@torch.no_grad()
def initialize_canonically(module: torch.nn.Module, *, seed: int, std: float) -> None:
    """Overwrite all parameters of a model chunk.

    Args:
        module: The chunk that this rank holds.
        seed: The run's seed.
        std: Standard deviation of matrices; norms become 1 and biases 0.
    """
    groups = megatron_groups()
    for param, spec in chunk_specs([module], HpMuon(), groups).items():
        whole = canonical_values(spec, seed=seed, std=std)
        if spec.split is not None:
            whole = local_slice(whole, spec.split, groups.axes[spec.split.axis].index)
        param.copy_(whole.reshape(param.shape))


def canonical_values(spec: ParamSpec, *, seed: int, std: float) -> torch.Tensor:
    """The whole initial value of one parameter.

    Args:
        spec: The parameter.
        seed: The run's seed.
        std: Standard deviation of matrices.

    Returns:
        Tensor of shape ``spec.shape``, float32, on the CPU.
    """
    if spec.role is Role.norm:
        return torch.ones(spec.shape)
    if len(spec.shape) < 2:
        return torch.zeros(spec.shape)
    digest = hashlib.sha256(f"{seed}/{spec.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randn(spec.shape, generator=generator) * std
