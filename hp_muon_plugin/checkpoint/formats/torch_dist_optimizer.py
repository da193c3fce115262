"""Optimizer state of ``torch_dist`` checkpoints, in each form that megatron-core has written it."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from hp_muon_plugin.checkpoint.buckets import Matches, Slot, placed, reverse_registration
from hp_muon_plugin.checkpoint.canonical import Key, Kind
from hp_muon_plugin.checkpoint.dcp_files import DcpFolder
from hp_muon_plugin.checkpoint.formats.torch_dist_parts import Flat, Fragmented, Part, Stacked, fragments
from hp_muon_plugin.checkpoint.megatron_names import expand, is_expert
from hp_muon_plugin.checkpoint.step_counts import StepPlace, live_step, place_in
from hp_muon_plugin.errors import CheckpointError

_NAMED = re.compile(r"(?:chained_(\d+)\.)?optimizer\.state\.([a-z0-9_]+)\.(.+)\Z")
_BUCKET = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.(dtype_.+)"
    r"\.bucket_idx_(\d+)\.([a-z0-9_]+)\Z"
)
_GROUP_OBJECT = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.optimizer/shard_0_1\Z")
_ZERO_GATHER = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.param_state(?:/.*)?\Z")
_KINDS = {"param": Kind.main, "fp32_param": Kind.main}
_PROOF_ELEMENTS = 2**14


@dataclass(slots=True)
class OptimizerParts:
    """What was found.

    Attributes:
        parts: Readers of state, by kind and name.
        groups: Param groups by index of the chained optimizer (0 if it is not chained).
        member: Index of the chained optimizer of each name with state; None where its key does not tell.
        form: Name of the form, as ``fully_reshardable``.
        step_place: Where step counts were, if there are any.
        unread: Keys that were not understood.
    """

    parts: dict[Key, Part] = field(default_factory=dict)
    groups: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    member: dict[str, int | None] = field(default_factory=dict)
    form: str | None = None
    step_place: StepPlace | None = None
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
    buckets: dict[tuple[int | None, int, int, str], dict[str, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
    original = vars(folder.metadata).get("mcore_data") or {}
    for key in folder.tensors:
        named, bucket = _NAMED.match(key), _BUCKET.match(key)
        if named:
            _add_named(found, folder, key, named, original)
        elif bucket:
            chain = None if bucket[1] is None else int(bucket[1])
            buckets[chain, int(bucket[2]), int(bucket[3]), bucket[4]][bucket[6]][int(bucket[5])] = key
        elif is_optimizer(key):
            found.unread.append(key)
    if any(_ZERO_GATHER.match(key) for key in folder.objects):
        raise CheckpointError(
            f"{folder.path} holds its optimizer in one object per group (dp_zero_gather_scatter), which is not read\n"
            "  fix: load and save it with --ckpt-fully-parallel-save, or in the legacy format (--ckpt-format torch)"
        )
    if buckets:
        found.form = "dp_reshardable"
        for (chain, group, number_, dtype), kinds in sorted(buckets.items(), key=lambda item: str(item[0])):
            where = f"{folder.path}: buffer {number_} {dtype} of optimizer {chain or 0}, group {group}"
            _add_buckets(found, folder, kinds, weights, chain, where)
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


def _add_buckets(
    found: OptimizerParts,
    folder: DcpFolder,
    kinds: Mapping[str, Mapping[int, str]],
    weights: Mapping[str, Part],
    chain: int | None,
    where: str,
) -> None:
    masters = kinds.get("param")
    if masters is None:
        raise CheckpointError(f"{where} has no fp32 masters, without which its parameters cannot be told apart")
    lengths = [folder.tensors[masters[index]].shape[0] for index in range(len(masters))]
    free = [name for name in weights if Key(name, Kind.main) not in found.parts]
    names = reverse_registration(free)
    numels = {name: prod(weights[name].shape) for name in names}

    def matches(name: str, slot: Slot) -> bool:
        shape = (numels[name],)
        master = Flat(masters[slot.bucket], slot.start, shape, torch.float32)
        return _same_ends(folder, master, weights[name])

    slots = _placed_in_one_class(names, numels, lengths, matches, chain is not None, where)
    for name, slot in slots.items():
        for kind, keys in kinds.items():
            key = keys[slot.bucket]
            part = Flat(key, slot.start, weights[name].shape, folder.tensors[key].dtype)
            found.parts[Key(name, str(_KINDS.get(kind, kind)))] = part
        found.member[name] = chain


def _placed_in_one_class(
    names: list[str], numels: dict[str, int], lengths: list[int], matches: Matches, chained: bool, where: str
) -> dict[str, Slot]:
    """Parameters of a buffer. Chained optimizers hold dense parameters or experts, mostly not both."""
    classes = [[name for name in names if is_expert(name) is expert] for expert in (False, True)] if chained else []
    for candidates in classes:
        try:
            return placed(candidates, numels, lengths, matches, where)
        except CheckpointError:
            continue
    return placed(names, numels, lengths, matches, where)


def _same_ends(folder: DcpFolder, master: Flat, weight: Part) -> bool:
    """Whether the first and last rows agree; the whole is compared when it is converted or verified."""
    row = prod(weight.shape[1:])
    rows = weight.shape[0] if weight.shape else 1
    step = max(1, _PROOF_ELEMENTS // max(1, row))
    for start, stop in {(0, min(rows, step)), (max(0, rows - step), rows)}:
        rounded = master.read(folder, start * row, stop * row).to(weight.dtype)
        stored = weight.read(folder, start, stop).reshape(-1)
        if not torch.equal(rounded.view(torch.uint8), stored.view(torch.uint8)):
            return False
    return True


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
