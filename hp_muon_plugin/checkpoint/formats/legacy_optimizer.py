"""Optimizer state of one rank of a legacy Megatron checkpoint, in its three forms.

DistributedOptimizer: flat buffers in ``distrib_optim.pt``, and groups without names. Plain: a torch state under
integer ids. Layer-wise: the same for each data-parallel rank's parameters, in files of their own (layer_wise.py).
"""

import re
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from hp_muon_plugin.checkpoint import lazy, torch_archive
from hp_muon_plugin.checkpoint.canonical import Kind
from hp_muon_plugin.checkpoint.formats import names
from hp_muon_plugin.checkpoint.formats.base import RECORD
from hp_muon_plugin.checkpoint.formats.flat_layout import starts_of
from hp_muon_plugin.checkpoint.formats.group_members import Param, members
from hp_muon_plugin.checkpoint.formats.integer_state import Named, Optimizer, named
from hp_muon_plugin.checkpoint.formats.layer_wise import CONTEXT, DATA, PREFIX, Shares, dealt, file_of
from hp_muon_plugin.checkpoint.formats.legacy_rank import OPTIMIZER_FILE, RankFile
from hp_muon_plugin.checkpoint.lazy import Lazy
from hp_muon_plugin.checkpoint.run_values import number, plain
from hp_muon_plugin.checkpoint.safe_pickle import Stored
from hp_muon_plugin.checkpoint.step_counts import StepPlace, place_in
from hp_muon_plugin.errors import CheckpointError, DamageError

_CHUNK = "{}/"  # parameters of several chunks are told apart by a prefix


@dataclass(slots=True)
class RankState:
    """What a rank's optimizer holds, by chunk and module name.

    Attributes:
        tensors: Tensors by kind.
        steps: Steps done.
        hyper: Values of its parameter group.
        form: ``distributed``, ``plain``, ``layer_wise`` or ``none``.
        step_place: Where step counts were, if there are any.
    """

    tensors: list[dict[str, dict[str, Lazy]]]
    steps: list[dict[str, float]]
    hyper: list[dict[str, dict[str, Any]]]
    form: str = "none"
    step_place: StepPlace | None = None


@dataclass(slots=True)
class _Params:
    """Parameters of a rank over all chunks, in the model's order, under names with the chunk's number."""

    order: list[Param] = field(default_factory=list)
    weights: dict[str, Lazy] = field(default_factory=dict)


def rank_optimizer(rank: RankFile) -> RankState:
    """Read the description of a rank's optimizer state.

    Args:
        rank: The rank.

    Raises:
        CheckpointError: If it is in a form that is not known, or does not fit the model.
    """
    count = len(rank.chunks)
    state = RankState([{} for _ in range(count)], [{} for _ in range(count)], [{} for _ in range(count)])
    params = _params(rank)
    folder = rank.files.folder / rank.folder
    layer_wise = _layer_wise_files(rank)
    saved = rank.value.get("optimizer")
    if layer_wise:
        state.form, found = "layer_wise", _layer_wise(rank, params, layer_wise)
    elif (folder / OPTIMIZER_FILE).is_file():
        state.form, found = "distributed", _distributed(rank, params, saved)
    elif saved is not None and _has_state(saved):
        state.form, found = "plain", _plain(rank, params, saved)
    elif saved is None:
        return state
    else:
        raise DamageError(
            f"{folder} has parameter groups but no {OPTIMIZER_FILE}, which should hold the optimizer's tensors\n"
            "  fix: copy the files of all ranks, or convert a copy saved with --no-save-optim"
        )
    state.step_place = found.step_place
    for (name, kind), tensor in found.tensors.items():
        chunk, bare = name.split("/", 1)
        state.tensors[int(chunk)].setdefault(bare, {})[kind] = tensor
    for name, step in found.steps.items():
        state.steps[int(name.split("/", 1)[0])][name.split("/", 1)[1]] = step
    for name, values in found.hyper.items():
        state.hyper[int(name.split("/", 1)[0])][name.split("/", 1)[1]] = values
    return state


def _params(rank: RankFile) -> _Params:
    found = _Params()
    for chunk, model in enumerate(rank.chunks):
        for name, tensor in model.items():
            if not names.is_buffer(name):
                expert = rank.expert_ranks > 1 and ".experts." in name
                found.order.append(Param(f"{chunk}/{name}", tensor.shape, expert))
                found.weights[f"{chunk}/{name}"] = tensor
    return found


def _has_state(saved: Any) -> bool:
    each = saved if isinstance(saved, list) else [saved]
    return any("state" in item or "state" in (item.get("optimizer") or {}) for item in each)


def _groups(saved: Any) -> list[dict[str, Any]]:
    each = saved if isinstance(saved, list) else [saved]
    inner = [item.get("optimizer", item) for item in each if item]
    return [plain(group) for item in inner for group in item.get("param_groups", [])]


def _distributed(rank: RankFile, params: _Params, saved: Any) -> Named:
    archive = torch_archive.Archive(rank.files, f"{rank.folder}/{OPTIMIZER_FILE}")
    where = str(rank.files.folder / rank.folder / OPTIMIZER_FILE)
    each = archive.value if isinstance(archive.value, list) else [archive.value]
    apart = any(param.expert_parallel for param in params.order)
    result = Named()
    for index, buffers in enumerate(each):
        if buffers is None:
            continue
        if not isinstance(buffers, dict) or not buffers.get("buckets_coalesced"):
            raise CheckpointError(
                f"{where} keeps buckets one by one, as megatron-core did before 0.5\n"
                "  fix: load and save it with a later megatron-core"
            )
        mine = [param for param in params.order if param.expert_parallel == (apart and index == len(each) - 1)]
        _take_buffers(rank, archive, buffers, mine, params, where, result)
    groups = _groups(rank.filled("optimizer"))
    result.step_place = place_in(groups)
    if groups:
        told = (rank.filled(RECORD) or {}).get("members")
        for group, owned in zip(groups, told or members(groups, params.order, rank.args, rank.where), strict=True):
            for name in owned:
                result.hyper[name] = {key: value for key, value in group.items() if key not in ("step", "params")}
                if group.get("step") is not None and (name, str(Kind.exp_avg)) in result.tensors:
                    result.steps[name] = number(group["step"])
    return result


def _take_buffers(
    rank: RankFile,
    archive: torch_archive.Archive,
    buffers: dict[Any, Any],
    mine: list[Param],
    params: _Params,
    where: str,
    result: Named,
) -> None:
    """Buffers are numbered chunk by chunk, within one by the dtype that its parameters first have."""
    wanted: list[tuple[str, torch.dtype]] = []
    for param in mine:
        place = param.name.split("/", 1)[0], params.weights[param.name].dtype
        if place not in wanted:
            wanted.append(place)
    indices = sorted(key for key in buffers if isinstance(key, int))
    if len(indices) != len(wanted):
        raise CheckpointError(f"{where} has {len(indices)} buffers, the model's parameters make {len(wanted)}")
    for index, (chunk, dtype) in zip(indices, wanted, strict=True):
        owned = [
            param for param in mine if param.name.startswith(f"{chunk}/") and params.weights[param.name].dtype == dtype
        ]
        (flats,) = buffers[index].values()
        tensors = {kind: value for kind, value in flats.items() if isinstance(value, Stored)}
        length = int(flats.get("numel_unpadded", next(iter(tensors.values())).shape[0]))
        starts = starts_of([(param.name, prod(param.shape), _shared(param.name, rank)) for param in owned], length)
        if starts is None:
            raise CheckpointError(
                f"{where}: buffer {index} has {length} elements, which no division into buckets explains\n"
                "  fix: save again without --overlap-grad-reduce, or in torch_dist with fully_reshardable"
            )
        for kind, stored in tensors.items():
            kind = str(Kind.main) if kind == "param" else kind
            if kind == Kind.main and dtype == torch.float32:
                continue
            flat = lazy.in_archive(rank.files, archive.located(stored), f"{kind} of buffer {index}")
            for param in owned:
                result.tensors[param.name, kind] = lazy.part_of_flat(flat, starts[param.name], param.shape)


def _shared(name: str, rank: RankFile) -> bool:
    """Whether Megatron keeps a parameter in a bucket of its own: an embedding that several pipeline stages have."""
    tied = rank.args.get("untie_embeddings_and_output_weights") is False
    pipelines = int(rank.args.get("pipeline_model_parallel_size") or 1)
    bare = name.split("/", 1)[1]
    if pipelines == 1 or bare not in (names.EMBEDDING, names.OUTPUT):
        return False
    if bare == names.EMBEDDING:
        return tied or bool(rank.args.get("mtp_num_layers"))
    # Where multi-token prediction has a copy of the embedding, that is the tied output layer, and this one is idle.
    return tied and names.EMBEDDING not in rank.chunks[int(name.split("/", 1)[0])]


def _plain(rank: RankFile, params: _Params, saved: Any) -> Named:
    each = saved if isinstance(saved, list) else [saved]
    optimizers = [_optimizer(rank, rank.archive, item) for item in each]
    dtypes = {name: weight.dtype for name, weight in params.weights.items()}
    return named(optimizers, params.order, dtypes, rank.args, rank.where, rank.filled(RECORD))


def _optimizer(rank: RankFile, archive: torch_archive.Archive, saved: dict[str, Any]) -> Optimizer:
    inner = saved.get("optimizer", saved)

    def read(value: Any, what: str) -> Any:
        return lazy.in_archive(rank.files, archive.located(value), what) if isinstance(value, Stored) else value

    stored = torch_archive.filled(inner["param_groups"], rank.files, archive, "param_groups")
    groups = [plain(group) for group in stored]
    ids = [[int(item) for item in group.pop("params")] for group in groups]
    state = {
        int(index): {kind: read(value, f"{kind} of parameter {index}") for kind, value in entry.items()}
        for index, entry in inner["state"].items()
    }
    masters = saved.get("fp32_from_fp16_params")
    return Optimizer(
        groups,
        [len(item) for item in ids],
        state,
        [[read(item, "a float32 master") for item in group] for group in masters or []],
        masters is not None,
        ids,
    )


def _layer_wise(rank: RankFile, params: _Params, files: dict[int, str]) -> Named:
    """Each data-parallel rank has some parameters, and numbers its own; dense ones are spread over several folders."""
    shares = _shares(rank, files)
    result = Named()
    own = shares.in_folder(rank.tensor, rank.expert)
    archives = {data: torch_archive.Archive(rank.files, f"{rank.folder}/{file_of(data)}") for data in own}
    each = {data: [_optimizer(rank, found, item) for item in _as_list(found.value)] for data, found in archives.items()}
    if not own:
        return result
    groups = [group for optimizer in each[own[0]] for group in optimizer.groups]
    told = (rank.filled(RECORD) or {}).get("members") or members(groups, params.order, rank.args, rank.where)
    deal = dealt(groups, told, {name: weight.numel for name, weight in params.weights.items()}, shares)
    dtypes = {name: weight.dtype for name, weight in params.weights.items()}
    for data in own:
        share = named(
            each[data],
            params.order,
            dtypes,
            rank.args,
            str(rank.files.folder / rank.folder / file_of(data)),
            {"members": deal.share(data, shares.expert_data_of(rank.tensor, data))},
        )
        result.tensors.update(share.tensors)
        result.steps.update(share.steps)
        result.hyper.update(share.hyper)
        result.step_place = result.step_place or share.step_place
    return result


def _layer_wise_files(rank: RankFile) -> dict[int, str]:
    """Of each data-parallel rank of a tensor and pipeline rank the folder with its file."""
    return {
        int(match[1]): folder
        for folder in rank.siblings()
        for item in (rank.files.folder / folder).glob(f"{PREFIX}*.pt")
        if (match := re.fullmatch(rf"{PREFIX}(\d+)", item.stem))
    }


def _shares(rank: RankFile, files: dict[int, str]) -> Shares:
    if int(rank.args.get(CONTEXT) or 1) > 1:
        raise CheckpointError(
            f"{rank.files.folder} has state of a layer-wise optimizer with {CONTEXT} {rank.args[CONTEXT]}: Megatron "
            "names its files by data-parallel rank alone, so that context-parallel ranks overwrote each other's\n"
            "  fix: convert without optimizer state, or save in torch_dist"
        )
    count = max(int(rank.args.get(DATA) or 1), *(data + 1 for data in files))
    shares = Shares(count, len(rank.tensors), rank.expert_tensor_ranks, rank.expert_ranks)
    for data in range(count):
        folder = rank.siblings()[shares.expert_of(rank.tensor, data)]
        if files.get(data) != folder:
            raise DamageError(
                f"{rank.files.folder / folder} has no {file_of(data)}, which holds that rank's share of the optimizer\n"
                "  fix: copy the files of all ranks"
            )
    return shares


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
