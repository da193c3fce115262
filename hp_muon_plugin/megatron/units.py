"""Which modules of a Megatron model are units, and what of each weight stays whole on one rank."""

from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.megatron.granularity import atom_of, end_units
from hp_muon_plugin.megatron.groups import MegatronGroups
from hp_muon_plugin.megatron.specs import chunk_specs

_LAYERS = (TransformerLayer, MultiTokenPredictionLayer)


def unit_modules(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The units inside a model chunk, inner ones first: layers and what ``end_units`` says.

    Args:
        module: The chunk, inside Megatron's wrappers for types or not.

    Returns:
        Modules that have parameters.
    """
    model: Any = innermost(module)
    names = end_units(is_tied=bool(getattr(model, "share_embeddings_and_output_weights", False)))
    ends = [child for name, child in model.named_modules() if name in names]
    layers = [child for child in reversed(list(model.modules())) if isinstance(child, _LAYERS)]
    return [child for child in [*layers, *ends] if any(True for _ in child.parameters())]


def innermost(module: torch.nn.Module) -> torch.nn.Module:
    """The model inside Megatron's wrappers for types.

    Args:
        module: A chunk, wrapped or not.

    Returns:
        The first module with a decoder, or the last one that wraps nothing.
    """
    model: Any = module
    while not hasattr(model, "decoder") and hasattr(model, "module"):
        model = model.module
    inner: torch.nn.Module = model
    return inner


def show_experts(module: torch.nn.Module, experts: set[torch.nn.Parameter]) -> None:
    """Give legacy grouped experts the shape that their layer reads them in, so that experts stay whole.

    Megatron-core's GroupedMLP (up to 0.16) keeps ``weight1`` as ``(hidden, E * ffn)``, which reads like a matrix, and
    views it as ``(E, hidden, ffn)``; the memory is the same.

    Args:
        module: A chunk that is not sharded yet; its parameters are replaced.
        experts: Those on expert-parallel ranks; the new parameters take the place of the old ones.
    """
    for layer in module.modules():
        count: Any = getattr(layer, "num_local_experts", None)
        for name in ("weight1", "weight2"):
            flat = layer._parameters.get(name)
            if not isinstance(count, int) or flat is None or flat.dim() != 2:
                continue
            hidden = flat.shape[0] if name == "weight1" else flat.shape[1]
            shape = (count, hidden, -1) if name == "weight1" else (count, -1, hidden)
            shown = torch.nn.Parameter(flat.detach().view(shape), requires_grad=flat.requires_grad)
            vars(shown).update(vars(flat))
            layer._parameters[name] = shown
            if flat in experts:
                experts.remove(flat)
                experts.add(shown)


def never_resharded(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Units that stay whole between forward and backward, whatever ``dp.reshard_after_forward`` says.

    Multi-token prediction looks tokens up once more after the last layer. So the embedding's backward begins
    before that of all layers and ends after it, and may share memory with none of them.

    Args:
        module: The chunk.

    Returns:
        Modules.
    """
    if not any(isinstance(child, MultiTokenPredictionLayer) for child in module.modules()):
        return []
    return [child for child in module.modules() if isinstance(child, LanguageModelEmbedding)]


def granularities(module: torch.nn.Module, groups: MegatronGroups) -> dict[torch.nn.Parameter, tuple[int, bool]]:
    """What of each weight stays whole: ``(elements, is_never_cut)``.

    Args:
        module: A chunk that is not sharded yet.
        groups: Megatron's groups.

    Returns:
        As :func:`~hp_muon_plugin.megatron.granularity.atom_of` says, by parameter.
    """
    specs = chunk_specs([module], HpMuon(), groups)
    return {param: atom_of(spec, tuple(param.shape)) for param, spec in specs.items()}
