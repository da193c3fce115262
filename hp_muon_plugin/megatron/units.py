"""Which modules of a Megatron model are units, and what of each weight stays whole on one rank."""

from typing import Any

import torch
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.fsdp import default_granularity
from hp_muon_plugin.layout.spec import ParamSpec, Role
from hp_muon_plugin.megatron.groups import MegatronGroups
from hp_muon_plugin.megatron.specs import chunk_specs

_LAYERS = (TransformerLayer, MultiTokenPredictionLayer)
_EXPERT_ROLES = (Role.expert_first, Role.expert_second)


def unit_modules(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The units inside a model chunk, inner ones first.

    Transformer layers, the embedding and the output layer. Where these two share a weight, the model
    reads it outside of both, so it belongs to the root; the final norm is a unit then, so that the first
    and the last pipeline stage lay the shared weight out alike.

    Args:
        module: The chunk, inside Megatron's wrappers for types or not.

    Returns:
        Modules that have parameters.
    """
    model: Any = module
    while not hasattr(model, "decoder") and hasattr(model, "module"):
        model = model.module
    is_tied = bool(getattr(model, "share_embeddings_and_output_weights", False))
    names = ("decoder.final_layernorm",) if is_tied else ("embedding", "output_layer")
    ends = [child for name, child in model.named_modules() if name in names]
    layers = [child for child in reversed(list(model.modules())) if isinstance(child, _LAYERS)]
    return [child for child in [*layers, *ends] if any(True for _ in child.parameters())]


def granularities(module: torch.nn.Module, groups: MegatronGroups) -> dict[torch.nn.Parameter, tuple[int, bool]]:
    """What of each weight stays whole: ``(elements, is_never_cut)``.

    Args:
        module: A chunk that is not sharded yet.
        groups: Megatron's groups.

    Returns:
        Whole matrices of routed experts, which are never cut; rows of other weights, which are cut only
        where padding would grow past the limit.
    """
    return {param: _granularity(param, spec) for param, spec in chunk_specs([module], HpMuon(), groups).items()}


def _granularity(param: torch.nn.Parameter, spec: ParamSpec) -> tuple[int, bool]:
    if spec.role not in _EXPERT_ROLES:
        return default_granularity(spec.name, param)
    if not spec.name.endswith((".weight1", ".weight2")):
        return param.numel(), True  # one expert
    if spec.role is Role.expert_second and spec.view is not None:
        return param.numel() // spec.view.factors[0], True  # flattened [E * M, N]
    return default_granularity(spec.name, param)  # flattened [N, E * M]: no matrix is contiguous
