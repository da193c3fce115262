"""Reader of Megatron's legacy checkpoints: ``mp_rank_TT[_PPP][_EEE]`` folders with torch.save files."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hp_muon_plugin.checkpoint.canonical import Key, Kind, Momentum, RunState
from hp_muon_plugin.checkpoint.files import Files
from hp_muon_plugin.checkpoint.formats import names
from hp_muon_plugin.checkpoint.formats.base import (
    RECORD,
    LazySource,
    agreeing,
    model_facts,
    recorded_state,
    take_args,
)
from hp_muon_plugin.checkpoint.formats.legacy_optimizer import rank_optimizer
from hp_muon_plugin.checkpoint.formats.legacy_rank import MODEL_FILE, RankFile, rank_files
from hp_muon_plugin.checkpoint.formats.random_states import rank_name
from hp_muon_plugin.checkpoint.formats.spelling import facts_of
from hp_muon_plugin.checkpoint.lazy import Lazy
from hp_muon_plugin.checkpoint.run_values import plain
from hp_muon_plugin.checkpoint.step_counts import StepPlace, note_place
from hp_muon_plugin.errors import CheckpointError, DamageError

NAME = "torch"
_ALIASED = (names.OUTPUT, names.EMBEDDING)


@dataclass(slots=True)
class _Found:
    """Parts of each tensor on tensor-parallel ranks, and what else ranks tell."""

    parts: dict[Key, dict[int, Lazy]] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    hyper: dict[str, dict[str, Any]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    form: str = "none"
    step_place: StepPlace | None = None


def open_legacy(path: Path) -> LazySource:
    """Open a checkpoint.

    Args:
        path: Its ``iter_*`` folder.

    Raises:
        CheckpointError: If a rank's folder or file is missing or damaged, or ranks do not fit together.
    """
    files = Files(path)
    ranks = rank_files(files, path)
    args = ranks[0].args
    found = _Found()
    starts = _layer_starts(ranks)
    for rank in ranks:
        _take_rank(rank, starts, found)
    tensors = dict(_merged(path, found, args))
    _drop_copies(tensors, args)
    return LazySource(NAME, path, tensors, lambda: _state(path, ranks, found, tensors), files)


def _layer_starts(ranks: list[RankFile]) -> dict[tuple[int, int], int]:
    """Number of the first layer of each (chunk, pipeline rank): chunks follow one another through all stages."""
    counts: dict[tuple[int, int], int] = {}
    for rank in ranks:
        for chunk, model in enumerate(rank.chunks):
            layers = {index for name in model if (index := names.layer_index(name)) is not None}
            counts[chunk, rank.pipeline] = len(layers)
    starts, first = {}, 0
    for place in sorted(counts):
        starts[place] = first
        first += counts[place]
    return starts


def _take_rank(rank: RankFile, starts: dict[tuple[int, int], int], found: _Found) -> None:
    state = rank_optimizer(rank)
    found.form = state.form if state.form != "none" else found.form
    found.step_place = found.step_place or state.step_place
    for chunk, model in enumerate(rank.chunks):
        local = _local_experts(rank, model)
        first_expert = rank.expert * local if rank.expert_ranks > 1 else 0
        start = starts[chunk, rank.pipeline]
        shapes = {}
        for name, tensor in model.items():
            kinds = {
                Kind.buffer if names.is_buffer(name) else Kind.weight: tensor,
                **state.tensors[chunk].get(name, {}),
            }
            for kind, value in kinds.items():
                if kind == Kind.main:
                    value = agreeing(value, tensor, f"{rank.where}: {name}")
                for single, part in names.single_experts(name, value, first=first_expert, local=local or None):
                    key = Key(names.with_layer(single, start + (names.layer_index(single) or 0)), str(kind))
                    place = rank.tensor % rank.expert_tensor_ranks if names.is_expert(single) else rank.tensor
                    found.parts.setdefault(key, {}).setdefault(place, part)
                    if kind == Kind.weight:
                        shapes[key.name] = part.shape
                    if name in state.steps[chunk] and kind == Kind.weight:
                        found.steps[key.name] = state.steps[chunk][name]
                    if name in state.hyper[chunk] and kind == Kind.weight:
                        found.hyper[key.name] = state.hyper[chunk][name]
        found.gated |= {name for name in shapes if names.FIRST.search(name) and names.is_gated(name, shapes)}


def _local_experts(rank: RankFile, model: dict[str, Lazy]) -> int:
    """Routed experts that a rank has: as many as its names say, or its share where they are in one tensor."""
    numbers = {index for name in model if (index := names.expert_index(name)) is not None}
    grouped = {int(match[1]) for name in model if (match := re.search(r"\.experts\.linear_fc1\.weight(\d+)$", name))}
    if numbers or grouped:
        return max(numbers | grouped) + 1
    total = rank.args.get("num_experts")
    return int(total) // rank.expert_ranks if total else 0


def _merged(path: Path, found: _Found, args: dict[str, Any]) -> Iterator[tuple[Key, Lazy]]:
    tensor_ranks = int(args.get("tensor_model_parallel_size") or 1)
    expert_ranks = int(args.get("expert_tensor_parallel_size") or tensor_ranks)
    for key, parts in found.parts.items():
        wanted = expert_ranks if names.is_expert(key.name) else tensor_ranks
        missing = [index for index in range(wanted) if index not in parts]
        if missing:
            raise DamageError(
                f"{path}: {key.name} of tensor-parallel rank {missing[0]} is in no file; there should be a folder "
                f"mp_rank_{missing[0]:02d}* with {MODEL_FILE}\n  fix: copy the folders of all ranks"
            )
        ordered = [parts[index] for index in range(wanted)]
        cut = names.cut_of(key.name, gated=key.name in found.gated, down_cut=_down_cut(key.name, ordered[0], args))
        if cut is names.Cut.unknown and wanted > 1:
            cut = _equal_everywhere(path, key, ordered)
        yield key, names.merged(ordered, cut)


def _down_cut(name: str, part: Lazy, args: dict[str, Any]) -> bool:
    """Whether down projections of latent attention are cut: a rank has fewer rows than the whole must have."""
    query, latent, position = (args.get(key) for key in ("q_lora_rank", "kv_lora_rank", "qk_pos_emb_head_dim"))
    if "linear_q_down_proj" in name:
        return query is not None and part.shape[0] != query
    if "linear_kv_down_proj" in name and latent is not None and position is not None:
        return bool(part.shape[0] != latent + position)
    return False


def _equal_everywhere(path: Path, key: Key, parts: list[Lazy]) -> names.Cut:
    first = parts[0].rows()
    if all(part.shape == parts[0].shape and torch.equal(part.rows(), first) for part in parts[1:]):
        return names.Cut.whole
    raise CheckpointError(
        f"{path}: {key.name} differs between tensor-parallel ranks, and it is not known how they share it\n"
        "  fix: save with tensor parallelism 1, or in torch_dist"
    )


def _drop_copies(tensors: dict[Key, Lazy], args: dict[str, Any]) -> None:
    """A tied output layer on the last stage is a copy of the embedding."""
    tied = args.get("untie_embeddings_and_output_weights") is False
    if tied and Key(names.EMBEDDING, Kind.weight) in tensors:
        for key in [key for key in tensors if key.name == names.OUTPUT]:
            del tensors[key]


def _state(path: Path, ranks: list[RankFile], found: _Found, tensors: dict[Key, Lazy]) -> RunState:
    first = ranks[0].value
    record = ranks[0].filled(RECORD)
    state = recorded_state(record, str(path))
    take_args(state, ranks[0].args)
    state.iteration = int(first.get("iteration", state.iteration))
    flops = first.get("num_floating_point_operations_so_far")
    state.flops = flops or state.flops
    state.scheduler = plain(first.get("opt_param_scheduler") or {})
    state.steps.update(found.steps)
    for name, values in found.hyper.items():
        state.hyper[name] = {**state.hyper.get(name, {}), **values}
    for rank in ranks:
        saved = rank.filled("rng_state")
        for data, values in enumerate(saved if isinstance(saved, list) else []):
            expert = rank.expert if rank.expert else None
            name = rank_name(rank.pipeline, rank.tensor, expert=expert, data=data)
            state.random[name] = {"states": plain(values)}
    if record is None and any(key.kind == Kind.momentum for key in tensors):
        state.momentum = Momentum.average
    there = {key.name for key in tensors}
    spelt = facts_of(name for rank in ranks for chunk in rank.chunks for name in chunk)
    state.steps = {name: step for name, step in state.steps.items() if name in there}
    state.hyper = {name: values for name, values in state.hyper.items() if name in there}
    state.model = {**state.model, **model_facts([key.name for key in tensors]), "legacy_optimizer": found.form, **spelt}
    note_place(state, found.step_place)
    return state
