"""Optimizer state of ``torch_dist`` checkpoints, in each form that megatron-core has written it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hp_muon_plugin.checkpoint.canonical import Key, Kind
from hp_muon_plugin.checkpoint.dcp_files import DcpFolder
from hp_muon_plugin.checkpoint.formats.torch_dist_buffer_files import BUCKET
from hp_muon_plugin.checkpoint.formats.torch_dist_buffers import read_buffers
from hp_muon_plugin.checkpoint.formats.torch_dist_parts import Fragmented, Part, Stacked, fragments
from hp_muon_plugin.checkpoint.megatron_names import expand
from hp_muon_plugin.checkpoint.run_values import plain
from hp_muon_plugin.checkpoint.step_counts import StepPlace, live_step, place_in

_NAMED = re.compile(r"(?:chained_(\d+)\.)?optimizer\.state\.([a-z0-9_]+)\.(.+)\Z")
_GROUP_OBJECT = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.optimizer/shard_0_1\Z")
_KINDS = {"param": Kind.main, "fp32_param": Kind.main}


@dataclass(slots=True)
class OptimizerParts:
    """What was found.

    Attributes:
        parts: Readers of state, by kind and name.
        groups: Param groups by index of the chained optimizer (0 if it is not chained).
        member: Index of the chained optimizer of each name with state; None where its key does not tell.
        form: Name of the form, as ``fully_reshardable``.
        step_place: Where step counts were, if there are any.
        bucket_size: Elements at which buckets of a distributed optimizer were closed, if there are several.
        unread: Keys that were not understood.
    """

    parts: dict[Key, Part] = field(default_factory=dict)
    groups: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    member: dict[str, int | None] = field(default_factory=dict)
    form: str | None = None
    step_place: StepPlace | None = None
    bucket_size: int | None = None
    unread: list[str] = field(default_factory=list)


def is_optimizer(key: str) -> bool:
    """Whether a key belongs to the optimizer."""
    return bool(re.match(r"(chained_\d+\.)?optimizer\.", key))


def read_optimizer(folder: DcpFolder, common: Mapping[str, Any], weights: Mapping[str, Part]) -> OptimizerParts:
    """Find the optimizer's tensors and groups.

    Args:
        folder: The checkpoint.
        common: Its common state.
        weights: Readers of the model's weights by canonical name.

    Raises:
        CheckpointError: If a form is not read, or its content does not belong to the weights.
    """
    found = OptimizerParts()
    original = vars(folder.metadata).get("mcore_data") or {}
    for key in folder.tensors:
        named = _NAMED.match(key)
        if named:
            _add_named(found, folder, key, named, original)
        elif is_optimizer(key) and not BUCKET.match(key):
            found.unread.append(key)
    args = plain(common["args"]) if "args" in common else {}
    buffers = read_buffers(folder, args, weights, {key.name for key in found.parts})
    if buffers.parts:
        found.form = "dp_reshardable" if any(map(BUCKET.match, folder.tensors)) else "dp_zero_gather_scatter"
        found.parts.update(buffers.parts)
        found.member.update(buffers.member)
        found.bucket_size = buffers.bucket_size
    _add_groups(found, folder, common)
    return found


def _add_named(
    found: OptimizerParts, folder: DcpFolder, key: str, named: re.Match[str], original: Mapping[str, Any]
) -> None:
    kind, name = _KINDS.get(named[2], named[2]), named[3]
    tensor = folder.tensors[key]
    reformed = original.get(key, {}).get("nd_reformulated_orig_global_shape")
    shape = tuple(reformed) if reformed else tensor.shape
    for canonical, place in expand(name, shape).items():
        own = shape[len(place.index) :]
        if reformed:
            cuts = fragments(key, tensor.shape, shape)[len(place.index) :]
            part: Part = Fragmented(key, place.index, own, tensor.dtype, cuts)
        else:
            part = Stacked(key, place.index, own, tensor.dtype)
        found.parts[Key(canonical, str(kind))] = part
        found.member[canonical] = None if named[1] is None else int(named[1])
    if reformed:
        found.form = "fully_sharded_model_space"
    elif found.form is None:
        found.form = "fully_reshardable" if named[2] == "param" else "none"
    elif named[2] == "param" and found.form == "none":
        found.form = "fully_reshardable"


def _add_groups(found: OptimizerParts, folder: DcpFolder, common: Mapping[str, Any]) -> None:
    optimizer = common.get("optimizer")
    if isinstance(optimizer, Mapping):
        chained = {int(key): value for key, value in optimizer.items() if str(key).isdigit()}
        for index, item in (chained or {0: optimizer}).items():
            groups = _groups_of(found, item)
            if groups:
                found.groups[index] = groups
    for key in folder.objects:
        match = _GROUP_OBJECT.match(key)
        if match:
            value = folder.object(key)
            value = value[0] if isinstance(value, list) else value
            found.groups.setdefault(int(match[1] or 0), _groups_of(found, value))


def _groups_of(found: OptimizerParts, item: Any) -> list[dict[str, Any]]:
    if not isinstance(item, Mapping):
        return []
    inner = item.get("optimizer", item)
    if not isinstance(inner, Mapping) or "param_groups" not in inner:
        return []
    state = inner.get("state")
    common_step = state.get("common_step") if isinstance(state, Mapping) else None
    groups = [dict(group) for group in inner["param_groups"]]
    place = place_in(groups) if common_step is None else StepPlace.parameter
    found.step_place = found.step_place or place
    for group in groups:
        step = live_step(group.get("step"), common_step)
        if step is not None:
            group["step"] = step
    return groups


def candidates(found: OptimizerParts, name: str) -> list[dict[str, Any]]:
    """Groups that a parameter may be in: those of its optimizer, or all of the kind that has its state.

    Args:
        found: What was found.
        name: Of a parameter with state.
    """
    index = found.member[name]
    if index is not None:
        return found.groups.get(index, [])
    every = [group for groups in found.groups.values() for group in groups]
    is_adam = Key(name, Kind.exp_avg) in found.parts
    return [group for group in every if ("betas" in group) is is_adam] or every
