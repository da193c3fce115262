"""From megatron-core's modules to parameter specs: names, shapes, matrix views, splits.

A spec describes the whole parameter, so it is the same on every tensor-parallel and data-parallel
rank. What a weight's rows mean is read from the module that owns it, not from its shape.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

import torch

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.layout import fused
from hp_muon_plugin.layout.spec import AxisSplit, ParamSpec, Role
from hp_muon_plugin.megatron.groups import MegatronGroups
from hp_muon_plugin.megatron.places import Place, buffer_places, places
from hp_muon_plugin.megatron.roles import megatron_role
from hp_muon_plugin.megatron.views import down_projection_pieces, matrix_view, tensor_parallel_cut

_EMBEDDING = "embedding.word_embeddings.weight"
_WRAPPERS = re.compile(r"^(module\.)+")
_LOCAL_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")
_GROUPED_EXPERT = re.compile(r"(?<=\.linear_fc[12]\.weight)\d+$")


def chunk_specs(
    chunks: Sequence[torch.nn.Module], config: HpMuon, groups: MegatronGroups
) -> dict[torch.nn.Parameter, ParamSpec]:
    """Specs of all parameters of the model chunks that this rank holds.

    Args:
        chunks: Model chunks, wrapped or not.
        config: Options; how fused weights are split.
        groups: Megatron's groups.

    Returns:
        Spec by parameter. A parameter with several names is listed once, under its first name, and
        as an embedding if any of its names is one.
    """
    specs: dict[torch.nn.Parameter, ParamSpec] = {}
    for chunk in chunks:
        renamed = _layer_names(chunk)
        for place in places(chunk):
            spec = _spec(place, renamed, config, groups)
            if place.param not in specs or spec.role is Role.embedding:
                first = specs.get(place.param)
                specs[place.param] = spec if first is None else replace(spec, name=first.name)
    return specs


def chunk_buffers(chunks: Sequence[torch.nn.Module], groups: MegatronGroups) -> dict[str, torch.Tensor]:
    """Persistent buffers of all model chunks of this rank, as the router's ``expert_bias``.

    Args:
        chunks: Model chunks, wrapped or not.
        groups: Megatron's groups.

    Returns:
        Buffers by canonical name.
    """
    found = {}
    for chunk in chunks:
        renamed = _layer_names(chunk)
        for place, buffer in buffer_places(chunk):
            first = groups.ep.index * place.num_local_experts if ".experts." in place.name else 0
            found[_canonical(place.name, renamed, first)] = buffer
    return found


def _layer_names(chunk: torch.nn.Module) -> dict[str, str]:
    """Global names of layers: local prefix -> prefix with the layer's number in the whole model."""
    renamed = {}
    for name, module in chunk.named_modules():
        number = getattr(module, "layer_number", None)
        head, _, last = name.rpartition(".")
        if last.isdigit() and isinstance(number, int) and head.endswith("layers"):
            renamed[f"{name}."] = f"{head}.{number - 1}."
    return renamed


def _canonical(name: str, renamed: dict[str, str], first_expert: int) -> str:
    for local, global_ in renamed.items():
        if name.startswith(local):
            name = global_ + name[len(local) :]
            break
    name = _WRAPPERS.sub("", name)
    if ".experts." in name:
        name = _LOCAL_EXPERT.sub(lambda found: str(int(found[0]) + first_expert), name)
        name = _GROUPED_EXPERT.sub(lambda found: str(int(found[0]) + first_expert), name)
    return name


def role_of(name: str, param: torch.nn.Parameter) -> Role:
    """What a parameter of Megatron's does.

    Args:
        name: Its name in the chunk; wrappers do not matter.
        param: The parameter, with the marks that Megatron sets.

    Returns:
        Its role.
    """
    is_marked = bool(getattr(param, "is_embedding_or_output_parameter", False))
    return megatron_role(_WRAPPERS.sub("", name), tuple(param.shape), is_embedding_or_output=is_marked)


def _spec(place: Place, renamed: dict[str, str], config: HpMuon, groups: MegatronGroups) -> ParamSpec:
    param, shape = place.param, tuple(place.param.shape)
    role = role_of(place.name, param)
    is_routed = ".experts." in place.name
    num_local = place.num_local_experts if is_routed else 0
    name = _canonical(place.name, renamed, groups.ep.index * num_local)
    if getattr(param, "shared_embedding", False):  # with tied embeddings the last stage holds a copy
        name, role = _EMBEDDING, Role.embedding
    axis = groups.etp if is_routed else groups.tp
    dim = int(getattr(param, "partition_dim", -1))
    is_split = axis.size > 1 and dim >= 0 and bool(getattr(param, "tensor_model_parallel", False))
    is_split = is_split and not _is_duplicated(place, role)
    if place.name.endswith((".experts.weight1", ".experts.weight2")):
        return _grouped_spec(place, name, role, num_local, axis.size if is_split else 1, config, groups)
    whole = list(shape)
    if is_split:
        whole[dim] *= axis.size
    view = matrix_view(place.name, place.config, role, tuple(whole), config)
    split = None
    if is_split:
        is_gated = bool(place.config.gated_linear_unit)
        split = AxisSplit(axis.axis, axis.size, *tensor_parallel_cut(role, tuple(whole), dim, is_gated=is_gated))
    return _checked(
        ParamSpec(
            name,
            role,
            tuple(whole),
            view=view,
            split=split,
            is_expert=not getattr(param, "allreduce", True),
            trainable=param.requires_grad,
        ),
        param,
    )


def _checked(spec: ParamSpec, param: torch.nn.Parameter) -> ParamSpec:
    if spec.view is not None:
        spec.view.check(spec.numel)
    assert spec.local_numel == param.numel(), (spec, tuple(param.shape))
    return spec


def _is_duplicated(place: Place, role: Role) -> bool:
    """Whether every rank holds all rows although megatron-core marks the weight as split.

    Transformer Engine's MLA down projections are such.
    """
    pieces = down_projection_pieces(place.name, place.config) if role is Role.latent_projection else None
    return pieces is not None and place.param.shape[0] == sum(rows for _, rows in pieces)


def _grouped_spec(
    place: Place,
    name: str,
    role: Role,
    experts: int,
    size: int,
    options: HpMuon,
    groups: MegatronGroups,
) -> ParamSpec:
    """Legacy grouped experts: one flattened 2-D parameter per layer (0.12 to 0.16)."""
    config, param = place.config, place.param
    is_gated = bool(config.gated_linear_unit)
    first = groups.ep.index * experts
    name = name.replace(".experts.weight", f".experts.{first}-{first + experts - 1}.weight")
    hidden = config.hidden_size
    if role is Role.expert_first:
        ffn = param.numel() // (experts * hidden) * size
        view = fused.grouped_first_view(experts, hidden, ffn, gated=is_gated, split=options.split_gate_up)
        factors = (experts, hidden, 2, ffn // 2) if is_gated else (experts, hidden, ffn)
        shape, dim = (hidden, experts * ffn), len(factors) - 1
    else:
        ffn = param.numel() // (experts * hidden) * size
        view = fused.grouped_second_view(experts, ffn, hidden)
        factors, shape, dim = (experts, ffn, hidden), (experts * ffn, hidden), 1
    split = AxisSplit("etp", size, factors, dim) if size > 1 else None
    is_expert = not getattr(param, "allreduce", True)
    spec = ParamSpec(name, role, shape, view=view, split=split, is_expert=is_expert, trainable=param.requires_grad)
    return _checked(spec, param)
