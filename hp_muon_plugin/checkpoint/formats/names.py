"""Names and shapes of Megatron models: experts in their spellings, and how tensor-parallel ranks cut a parameter."""

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from math import prod

from hp_muon_plugin.checkpoint import lazy
from hp_muon_plugin.checkpoint.lazy import Lazy
from hp_muon_plugin.checkpoint.megatron_names import unfused
from hp_muon_plugin.errors import CheckpointError

EXTRA_STATE = "_extra_state"
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"

_LOCAL_EXPERT = re.compile(r"^(.*\.experts\.local_experts\.)(\d+)(\..*)$")
_GROUPED = re.compile(r"^(.*\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)$")
_STACKED = re.compile(r"^(.*\.experts)\.(linear_fc[12])\.(weight|bias)$")
_GROUPED_MLP = re.compile(r"^(.*\.experts)\.weight([12])$")
_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(\..*)$")
_BUFFERS = (".expert_bias", ".inv_freq", ".local_tokens_per_expert", ".running_mean", ".running_var", ".epsilon")

_ROWS = re.compile(
    r"(word_embeddings\.weight|output_layer\.(weight|bias)|eh_proj\.(weight|bias)|core_attention\.softmax_offset"
    r"|linear_(qkv|q_proj|q_up_proj|kv_up_proj)\.(weight|bias))$"
)
_DOWN = re.compile(r"linear_(q|kv)_down_proj\.weight$")
_COLUMNS = re.compile(r"(linear_proj|linear_fc2)\.weight$")
_WHOLE = re.compile(
    r"(norm\.(weight|bias)|layer_norm_(weight|bias)|router\.(weight|bias|expert_bias)|(linear_proj|linear_fc2)\.bias"
    r"|shared_experts\.gate_weight|position_embeddings\.weight|tokentype_embeddings\.weight|\.inv_freq)$"
)
FIRST = re.compile(r"linear_fc1\.(weight|bias)$")


class Cut(StrEnum):
    """How tensor-parallel ranks share a parameter."""

    rows = "rows"
    columns = "columns"
    gated = "gated"
    """Each rank has its part of the gate above its part of the up projection."""
    whole = "whole"
    unknown = "unknown"


def is_buffer(name: str) -> bool:
    """Whether a tensor of the model is no parameter."""
    return name.endswith(_BUFFERS)


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to a routed expert."""
    return _LOCAL_EXPERT.match(name) is not None


def expert_index(name: str) -> int | None:
    """Number of the routed expert that a parameter belongs to."""
    found = _LOCAL_EXPERT.match(name)
    return int(found[2]) if found else None


def with_expert(name: str, index: int) -> str:
    """The same parameter of another expert."""
    found = _LOCAL_EXPERT.match(name)
    assert found is not None
    return f"{found[1]}{index}{found[3]}"


def layer_index(name: str) -> int | None:
    """Number of the decoder layer that a parameter belongs to."""
    found = _LAYER.match(name)
    return int(found[2]) if found else None


def with_layer(name: str, index: int) -> str:
    """The same parameter of another decoder layer; names outside of the decoder's layers stay."""
    found = _LAYER.match(name)
    return f"{found[1]}{index}{found[3]}" if found else name


def bare(name: str) -> str:
    """A name without the prefixes of wrappers."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def is_gated(name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a first layer of an MLP is [gate; up]: it has twice the rows that the second has columns.

    Args:
        name: Name of the first layer's weight or bias.
        shapes: Shapes of the model's tensors on the same rank, by name.
    """
    first = re.sub(r"linear_fc1\.(weight|bias)$", "linear_fc1.weight", name)
    second = shapes.get(first.replace("linear_fc1.weight", "linear_fc2.weight"))
    mine = shapes.get(first)
    return second is not None and mine is not None and mine[-2] == 2 * second[-1]


def cut_of(name: str, *, gated: bool, down_cut: bool) -> Cut:
    """How tensor-parallel ranks share a parameter.

    Args:
        name: Canonical name.
        gated: Whether first layers are gated.
        down_cut: Whether the down projections of multi-latent attention are cut (local specification), or every
            rank has them whole (Transformer Engine).
    """
    if FIRST.search(name):
        return Cut.gated if gated else Cut.rows
    if _DOWN.search(name):
        return Cut.rows if down_cut else Cut.whole
    if _ROWS.search(name):
        return Cut.rows
    if _COLUMNS.search(name):
        return Cut.columns
    return Cut.whole if _WHOLE.search(name) else Cut.unknown


def merged(parts: list[Lazy], cut: Cut) -> Lazy:
    """A whole parameter from the tensor-parallel ranks' parts, in order."""
    if len(parts) == 1 or cut is Cut.whole:
        return parts[0]
    if cut is Cut.columns:
        return lazy.columns_of(parts)
    if cut is Cut.rows:
        return lazy.rows_of(parts)
    halves = [part.shape[0] // 2 for part in parts]
    gates = [lazy.cut_rows(part, 0, half) for part, half in zip(parts, halves, strict=True)]
    ups = [lazy.cut_rows(part, half, 2 * half) for part, half in zip(parts, halves, strict=True)]
    return lazy.rows_of([*gates, *ups])


def shared(whole: Lazy, cut: Cut, index: int, count: int, name: str) -> Lazy:
    """One tensor-parallel rank's part of a parameter.

    Args:
        whole: The parameter.
        cut: How ranks share it.
        index: Which rank.
        count: Of how many.
        name: For messages.

    Raises:
        CheckpointError: If it does not divide.
    """
    if count == 1 or cut is Cut.whole:
        return whole
    length = whole.shape[1] if cut is Cut.columns else whole.shape[0]
    pieces = 2 * count if cut is Cut.gated else count
    if length % pieces:
        raise CheckpointError(
            f"{name} of shape {whole.shape} cannot be cut into {count} tensor-parallel parts: {length} is no multiple "
            f"of {pieces}\n  fix: choose another tensor-parallel size"
        )
    step = length // pieces
    if cut is Cut.columns:
        return lazy.cut_columns(whole, index * step, (index + 1) * step)
    if cut is Cut.rows:
        return lazy.cut_rows(whole, index * step, (index + 1) * step)
    half = length // 2
    return lazy.rows_of([lazy.cut_rows(whole, start + index * step, start + (index + 1) * step) for start in (0, half)])


def single_experts(name: str, tensor: Lazy, *, first: int = 0, local: int | None = None) -> Iterator[tuple[str, Lazy]]:
    """A tensor under canonical names: stacks and groups of experts become single experts, others stay.

    Args:
        name: Name without wrapper prefixes.
        tensor: The tensor.
        first: Number of the first expert that the file holds.
        local: How many experts it holds; needed for GroupedMLP's ``weight1`` and ``weight2``.

    Yields:
        Canonical names with tensors.
    """
    name = unfused(name)
    if found := _LOCAL_EXPERT.match(name):
        yield f"{found[1]}{int(found[2]) + first}{found[3]}", tensor
    elif found := _GROUPED.match(name):
        yield f"{found[1]}.local_experts.{int(found[4]) + first}.{found[2]}.{found[3]}", tensor
    elif (found := _STACKED.match(name)) and len(tensor.shape) == (3 if found[3] == "weight" else 2):
        for index in range(tensor.shape[0]):
            yield f"{found[1]}.local_experts.{first + index}.{found[2]}.{found[3]}", lazy.item_of(tensor, index)
    elif (found := _GROUPED_MLP.match(name)) and len(tensor.shape) == 2:
        yield from _grouped_mlp(found[1], int(found[2]), tensor, first, local)
    else:
        yield name, tensor


def _grouped_mlp(prefix: str, which: int, tensor: Lazy, first: int, local: int | None) -> Iterator[tuple[str, Lazy]]:
    """GroupedMLP's (H, E * 2F) and (E * F, H), which hold E matrices (H, 2F) and (F, H) one after another."""
    if not local:
        raise CheckpointError(f"{prefix}.weight{which}: the number of experts is not in the checkpoint")
    flat = lazy.flat_of([(0, tensor)], prod(tensor.shape))
    shape = (tensor.shape[0], tensor.shape[1] // local) if which == 1 else (tensor.shape[0] // local, tensor.shape[1])
    for index in range(local):
        single = lazy.transposed(lazy.part_of_flat(flat, index * prod(shape), shape))
        yield f"{prefix}.local_experts.{first + index}.linear_fc{which}.weight", single
