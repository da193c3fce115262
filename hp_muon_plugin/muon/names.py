"""Roles of the parameters of any ``nn.Module``, from module types first and names second.

Megatron models have an adapter of their own that knows their fused weights. This one is for plain
PyTorch: what it does not recognise and has two dims is a matrix.
"""

import re
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.layout.spec import MatrixView, ParamSpec, Role, plain_matrix, stacked_matrices

_NAME_ROLES: tuple[tuple[Role, re.Pattern[str]], ...] = (
    (
        Role.embedding,
        re.compile(
            r"(^|\.)(\w*embed(ding|dings|_tokens|_positions|s)?|(\w+_)?embs?|wte|wpe|tok_emb\w*|pos_emb\w*)(\.|$)"
            r"|(^|\.)(tok|token|tokens|pos|position|positions|vocab|\w+_tokens?|relative_attention_bias)(\.weight)?$"
            r"|^(model\.|transformer\.)?shared\.weight$"  # T5
        ),
    ),
    (
        Role.output,
        re.compile(
            r"(^|\.)((\w+_)?head|output|output_layer|embed_out|unembed\w*|classifier|score|vocab_proj\w*)\.weight$"
            r"|(^|\.)((to_)?logits(\.\d+)?|predictions\.decoder)\.weight$"
            r"|^(model\.)?proj_out\.weight$"  # Whisper; inside a block it is a hidden matrix
        ),
    ),
    (Role.router, re.compile(r"(^|\.)(router|gate|wg|gating)\.(weight|wg\.weight)$")),
    (Role.conv, re.compile(r"(^|\.|_)conv\w*\.weight$")),
    (Role.norm, re.compile(r"(norm\w*|(^|\.)ln_\w+|(^|\.)\w*layernorm\w*)\.weight$", re.IGNORECASE)),
    (Role.bias, re.compile(r"(^|[._])bias$")),
    (Role.fused_unknown, re.compile(r"(^|\.)in_proj(_weight|\.weight)$")),
)
_NORM_TYPES = ("norm",)
_CONV_TYPES = (torch.nn.modules.conv._ConvNd,)


def module_specs(module: torch.nn.Module) -> dict[torch.nn.Parameter, ParamSpec]:
    """Specs of all parameters of a module, each parameter once even if several names lead to it.

    Args:
        module: Any module.

    Returns:
        Spec by parameter; a shared parameter has its first name, and is an embedding if any of
        its places is one.
    """
    owners: dict[torch.nn.Parameter, list[tuple[str, torch.nn.Module]]] = {}
    for module_name, owner in module.named_modules(remove_duplicate=True):
        for name, param in owner.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(param, []).append((f"{module_name}.{name}" if module_name else name, owner))
    specs = {}
    for param, places in owners.items():
        roles = [_role(name, param, owner) for name, owner in places]
        chosen = next((r for r in (Role.embedding, Role.output) if r in roles), roles[0])
        specs[param] = _spec(places[0][0], param, chosen)
    return specs


def named_specs(named: Iterable[tuple[str, torch.nn.Parameter]]) -> dict[torch.nn.Parameter, ParamSpec]:
    """Specs from names and shapes alone.

    Args:
        named: As ``module.named_parameters()`` gives them.

    Returns:
        Spec by parameter.
    """
    return {param: _spec(name, param, _role(name, param, None)) for name, param in named}


def refuse_sharded(
    option: str, named: Iterable[tuple[str, torch.nn.Parameter]], fix: str, *, with_ours: bool = False
) -> None:
    """Refuse parameters that another library has cut into shards: Muon needs whole matrices.

    Args:
        option: Where they were given.
        named: Names and parameters.
        fix: What to do instead.
        with_ours: Whether shards of our ``hp_fully_shard`` are refused too.

    Raises:
        ConfigError: Naming the first one.
    """
    for name, param in named:
        kind = _sharded_kind(param, with_ours=with_ours)
        if kind is not None:
            why = f"is {kind}, so that this rank holds a shard of the matrix, and Muon needs the whole"
            raise ConfigError(option, name, why, fix)


def _sharded_kind(param: torch.nn.Parameter, *, with_ours: bool) -> str | None:
    if isinstance(param, DTensor):
        return "a DTensor (torch's fully_shard or tensor parallelism, Megatron-FSDP)"
    if hasattr(param, "hp_shard"):
        return "a shard of hp_fully_shard" if with_ours else None
    if getattr(param, "_is_flat_param", False) or hasattr(param, "_fsdp_flattened"):
        return "a flat parameter of torch's FullyShardedDataParallel"
    if logical_shape(param) != tuple(param.shape):
        return "a placeholder of DeepSpeed's ZeRO-3"
    return None


def logical_shape(param: torch.Tensor) -> tuple[int, ...]:
    """Shape of the whole parameter, also where a placeholder stands for it.

    Args:
        param: A parameter; DeepSpeed's ZeRO-3 keeps the true shape in ``ds_shape``, our ``hp_fully_shard`` in
            ``hp_shard.shape``.

    Returns:
        The shape.
    """
    shard = getattr(param, "hp_shard", None)
    return tuple(getattr(param, "ds_shape", param.shape) if shard is None else shard.shape)


def _role(name: str, param: torch.Tensor, owner: torch.nn.Module | None) -> Role:
    shape = logical_shape(param)
    if isinstance(owner, torch.nn.Embedding | torch.nn.EmbeddingBag):
        return Role.embedding
    if isinstance(owner, _CONV_TYPES) and len(shape) > 1:
        return Role.conv
    for role, pattern in _NAME_ROLES:
        if pattern.search(name):
            return Role.bias if role is Role.norm and name.endswith("bias") else role
    if len(shape) < 2:
        is_norm = owner is not None and any(word in type(owner).__name__.lower() for word in _NORM_TYPES)
        return Role.norm if is_norm else Role.vector
    return Role.matrix if len(shape) <= 3 else Role.conv


def _view(shape: tuple[int, ...], role: Role) -> MatrixView | None:
    if len(shape) == 2:
        return plain_matrix(*shape)
    if len(shape) == 3 and role is Role.matrix:
        return stacked_matrices(*shape)
    return None


def _spec(name: str, param: torch.nn.Parameter, role: Role) -> ParamSpec:
    shape = logical_shape(param)
    return ParamSpec(name, role, shape, view=_view(shape, role), trainable=param.requires_grad)
