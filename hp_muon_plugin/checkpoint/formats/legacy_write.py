"""Writer of Megatron's legacy checkpoints."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hp_muon_plugin.checkpoint import lazy
from hp_muon_plugin.checkpoint.canonical import Kind, Loss, Momentum, RunState, Source, Target
from hp_muon_plugin.checkpoint.formats import names
from hp_muon_plugin.checkpoint.formats.base import RECORD, check_momentum, momentum_of, record
from hp_muon_plugin.checkpoint.formats.flat_layout import layout
from hp_muon_plugin.checkpoint.formats.fsdp2_write import extra_states
from hp_muon_plugin.checkpoint.formats.integer_state import split_optimizers
from hp_muon_plugin.checkpoint.formats.layer_wise import (
    CONTEXT,
    DATA,
    IS_USED,
    Shares,
    dealt,
    file_of,
    in_layer_wise_order,
)
from hp_muon_plugin.checkpoint.formats.legacy import NAME
from hp_muon_plugin.checkpoint.formats.legacy_forms import LAYER_WISE, NO_STATE, form_of, shares_of
from hp_muon_plugin.checkpoint.formats.legacy_plan import Plan, Rank, plan
from hp_muon_plugin.checkpoint.formats.legacy_rank import MODEL_FILE, OPTIMIZER_FILE
from hp_muon_plugin.checkpoint.formats.megatron_run import megatron_args
from hp_muon_plugin.checkpoint.formats.model_args import model_args
from hp_muon_plugin.checkpoint.formats.random_states import by_place, rank_name
from hp_muon_plugin.checkpoint.formats.stages import INSIDE, bucket_size_of, expert_tensors_of, sizes_of
from hp_muon_plugin.checkpoint.lazy import Lazy
from hp_muon_plugin.checkpoint.run_values import random_state
from hp_muon_plugin.checkpoint.step_counts import StepPlace, fused_values, group_value, inexact, wanted_place
from hp_muon_plugin.checkpoint.torch_archive_stream import write_archive
from hp_muon_plugin.errors import ConfigError

Groups = list[list[tuple[dict[str, Any], list[str]]]]


class LegacyWriter:
    """Writes ``mp_rank_*`` folders for any tensor, pipeline and expert size.

    ``Target.sharding`` is ``distributed`` (DistributedOptimizer), ``plain`` (without it, as Megatron's Muon), or
    ``layer_wise`` (Muon with the layer-wise optimizer: files of their own for data-parallel ranks).
    """

    format = NAME

    def losses(self, source: Source, target: Target) -> list[Loss]:
        """As :class:`~hp_muon_plugin.checkpoint.canonical.Writer`."""
        made, state = _plan(source, target), source.state()
        random = by_place(state)
        check_momentum(source, target, Momentum.average)
        place = wanted_place(source, target)
        found: list[Loss] = []
        missing = [rank for rank in made.ranks() if _random(random, rank) is None]
        if missing:
            text = (
                f"random state of {len(missing)} of {len(made.ranks())} ranks: the source has none as Megatron keeps "
                "it, so load with --no-load-rng; those ranks then start from the seed"
            )
            found.append(Loss(text))
        form = form_of(made)
        if form == "distributed":
            if uneven := _uneven_steps(state, _groups(made)):
                text = "steps of parameters of one group that differ: DistributedOptimizer keeps one for each group"
                found.append(Loss(text, steps=uneven))
        elif form != "none" and place is StepPlace.parameter:
            found += inexact(state)
        for name in (names.EMBEDDING, names.OUTPUT):
            rows = next((info.shape[0] for key, info in source.tensors().items() if key.name == name), None)
            if rows is not None and rows > made.shapes[name][0]:
                found.append(Loss(f"{rows - made.shapes[name][0]} rows of padding of {name}"))
        return found

    def write(self, source: Source, folder: Path, target: Target, count: Callable[[int], None], budget: int) -> None:
        """As :class:`~hp_muon_plugin.checkpoint.canonical.Writer`."""
        made = _plan(source, target)
        form, groups = form_of(made), _groups(made)
        shares = shares_of(made) if form == LAYER_WISE else None
        if shares is not None:
            groups = in_layer_wise_order(groups, source.state().args)
        random = by_place(source.state())
        for rank in made.ranks():
            here = folder / _folder(made, rank)
            here.mkdir()
            chunks = made.members(rank)
            members = {f"{chunk}/{local}": name for chunk, own in enumerate(chunks) for local, name in own.items()}
            value = _model_file(made, rank, chunks, shares)
            if (own_state := _random(random, rank)) is not None:
                value["rng_state"] = [own_state]
            if form != "none":
                owned = [[(values, _on_rank(names_, members)) for values, names_ in part] for part in groups]
                if shares is None:
                    owned = [_in_order(part, list(members)) for part in owned]
                value[RECORD]["members"] = [item for part in owned for _, item in part]

                def optimizer(share: Groups) -> Any:
                    each = [_group_file(part, form, made, rank, members, source.state()) for part in share]  # noqa: B023
                    return _one_or_list(each)

                if shares is None:
                    value["optimizer"] = optimizer(owned)
                for data, share in _dealt(made, rank, members, owned, shares) if shares is not None else ():
                    state = optimizer(share)
                    value.setdefault("optimizer", state)  # as Megatron, whose first rank here writes both
                    write_archive(here / file_of(data), state, count, target.jobs)
                if form == "distributed":
                    # The first data rank of the dense optimizer has its buffers, and that is on this expert rank.
                    first = rank.tensor // made.expert_tensors % made.target.ep
                    dense = [None] if len(groups) > 1 and rank.expert != first else []
                    each = [{name for _, item in part for name in item} for part in groups[len(dense) :]]
                    flats = [*dense, *(_buffers(made, rank, chunks, wanted) for wanted in each)]
                    write_archive(here / OPTIMIZER_FILE, _one_or_list(flats), count, target.jobs)
            write_archive(here / MODEL_FILE, value, count, target.jobs)


def _plan(source: Source, target: Target) -> Plan:
    inside = expert_tensors_of(source, target)
    if target.tp % inside:
        raise ConfigError(
            f"--option {INSIDE}",
            inside,
            f"{target.tp} tensor-parallel ranks cut folders, of which it is no divisor",
            "leave it out",
        )
    return plan(source, target, expert_tensors=inside)


def _folder(made: Plan, rank: Rank) -> str:
    name = f"mp_rank_{rank.tensor:02d}"
    name += f"_{rank.pipeline:03d}" if made.target.pp > 1 else ""
    return name + (f"_{rank.expert:03d}" if made.target.ep > 1 else "")


def _one_or_list(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _groups(made: Plan) -> Groups:
    """Groups of the whole model: Megatron has the same on every rank, some of them empty."""
    params = [name for name in made.order if Kind.buffer not in made.kinds[name]]
    apart = frozenset(name for name in params if made.target.ep > 1 and names.is_expert(name))
    return split_optimizers(made.source.state(), params, apart)


def _on_rank(owned: list[str], members: dict[str, str]) -> list[str]:
    wanted = set(owned)
    return [local for local, name in members.items() if name in wanted]


def _in_order(part: list[tuple[dict[str, Any], list[str]]], order: list[str]) -> list[tuple[dict[str, Any], list[str]]]:
    """Groups of a rank in the order in which megatron-core takes them.

    Before it gave groups a ``default_config`` (0.12), each rank made those that it had parameters for, in their order,
    and a checkpoint's groups were taken by their number.
    """
    if any("default_config" in values for values, _ in part):
        return part
    place = {name: index for index, name in enumerate(order)}
    return sorted((group for group in part if group[1]), key=lambda group: min(place[name] for name in group[1]))


def _dealt(
    made: Plan, rank: Rank, members: dict[str, str], owned: Groups, shares: Shares
) -> Iterator[tuple[int, Groups]]:
    """Groups of each data-parallel rank whose file is in the folder of a rank."""
    flat = [group for part in owned for group in part]
    owners = {local: members[local] for _, item in flat for local in item}
    numels = {local: made.tensor(name, Kind.weight, rank).numel for local, name in owners.items()}
    deal = dealt([values for values, _ in flat], [item for _, item in flat], numels, shares)
    for data in shares.in_folder(rank.tensor, rank.expert):
        share = iter(deal.share(data, shares.expert_data_of(rank.tensor, data)))
        yield data, [[(values, next(share)) for values, _ in part] for part in owned]


def _uneven_steps(state: RunState, groups: Groups) -> list[str]:
    each = [{name: state.steps[name] for name in owned if name in state.steps} for part in groups for _, owned in part]
    return [name for steps in each for name, step in steps.items() if step != max(steps.values())]


def _chunk(made: Plan, rank: Rank, members: dict[str, str], ends: bool) -> dict[str, Any]:
    model: OrderedDict[str, Any] = OrderedDict()
    for local, name in members.items():
        model[local] = made.tensor(name, Kind.buffer if Kind.buffer in made.kinds[name] else Kind.weight, rank)
    for module in extra_states({local: [local] for local in members}):
        if ends or not module.startswith("output_layer."):
            model[module] = None
    return model


def _model_file(made: Plan, rank: Rank, members: list[dict[str, str]], shares: Shares | None) -> dict[str, Any]:
    source, target = made.source, made.target
    state = source.state()
    chunks = zip(members, made.stages[rank.pipeline], strict=True)
    models = [_chunk(made, rank, own, chunk.ends) for own, chunk in chunks]
    sizes = {**sizes_of(source, target), INSIDE: made.expert_tensors, "iteration": state.iteration}
    if names.EMBEDDING in made.shapes:
        sizes["padded_vocab_size"] = made.shapes[names.EMBEDDING][0]
        sizes["untie_embeddings_and_output_weights"] = not made.tied
    if shares is not None:
        sizes |= {DATA: shares.data, CONTEXT: 1, IS_USED: True}
    if state.consumed_samples is not None:
        sizes["consumed_train_samples"] = state.consumed_samples
    value: dict[str, Any] = {
        "args": megatron_args({**state.args, **model_args(source, target)}, NAME, **sizes),
        "checkpoint_version": 3.0,
        "iteration": state.iteration,
        **({f"model{chunk}": model for chunk, model in enumerate(models)} if len(models) > 1 else {"model": models[0]}),
        "opt_param_scheduler": state.scheduler,
        "num_floating_point_operations_so_far": state.flops or 0,
        RECORD: record(source, momentum_of(source, target, Momentum.average), wanted_place(source, target)),
    }
    return value


def _random(by_name: Mapping[str, Any], rank: Rank) -> dict[str, Any] | None:
    """Random state of a rank: its own where experts have theirs, else that of its tensor and pipeline rank."""
    own = rank_name(rank.pipeline, rank.tensor, expert=rank.expert or None)
    found = by_name.get(own)
    if isinstance(found, dict) and isinstance(found.get("states"), dict) and "rng_tracker_states" in found["states"]:
        restored: dict[str, Any] = random_state(found["states"])
        return restored
    return None


def _group_file(
    part: list[tuple[dict[str, Any], list[str]]],
    form: str,
    made: Plan,
    rank: Rank,
    members: dict[str, str],
    state: RunState,
) -> dict[str, Any]:
    """An optimizer's entry in the model file."""
    place = wanted_place(made.source, made.target)
    in_groups = form == "distributed" or place is not StepPlace.parameter
    groups = []
    of_all = [state.steps[name] for name in (made.order if in_groups else ()) if name in state.steps]
    for values, owned in part:
        steps = [state.steps[members[name]] for name in owned if members[name] in state.steps] if in_groups else []
        steps = of_all if not owned and "betas" in values else steps  # Megatron asks all groups, also empty ones
        groups.append({**fused_values(values, place), **({"step": group_value(max(steps), place)} if steps else {})})
    if form == "distributed":
        return {"optimizer": {"param_groups": groups}}
    ids: dict[str, int] = {}
    for group, (_, owned) in zip(groups, part, strict=True):
        first = len(ids)
        ids.update({name: first + index for index, name in enumerate(owned)})
        group["params"] = [ids[name] for name in owned]
    inner = {
        "state": {number: _state_of(made, rank, members[name], in_groups) for name, number in ids.items()},
        "param_groups": groups,
    }
    masters = [
        [made.tensor(members[name], Kind.main, rank) for name in owned if Kind.main in made.kinds[members[name]]]
        for _, owned in part
    ]
    if any(Kind.main in kinds for kinds in made.kinds.values()):
        return {"optimizer": inner, "fp32_from_fp16_params": masters}
    return inner


def _state_of(made: Plan, rank: Rank, name: str, without_step: bool) -> dict[str, Any]:
    found: dict[str, Any] = {kind: made.tensor(name, kind, rank) for kind in made.kinds[name] if kind not in NO_STATE}
    steps = made.source.state().steps
    if name in steps and not without_step:
        found["step"] = lazy.in_memory(torch.tensor(steps[name], dtype=torch.float32))
    return found


def _buffers(made: Plan, rank: Rank, members: list[dict[str, str]], wanted: Collection[str]) -> dict[Any, Any]:
    """Flat buffers of an optimizer."""
    found: dict[Any, Any] = {"buckets_coalesced": True}
    for number, buffer in enumerate(made.buffers(rank, members, wanted.__contains__)):
        starts, total = layout(buffer.entries, bucket_size_of(made.source, made.target, rank.pipeline, buffer.chunk))
        kinds = [kind for kind in made.kinds[next(iter(buffer.names.values()))] if kind not in NO_STATE]
        flats: dict[str, Any] = {"param": _flat(made, rank, buffer.names, starts, total, None)}
        flats |= {kind: _flat(made, rank, buffer.names, starts, total, kind) for kind in kinds}
        found[number] = {(buffer.dtype, torch.float32): {**flats, "numel_unpadded": total}}
    return found


def _flat(
    made: Plan, rank: Rank, members: dict[str, str], starts: dict[str, int], total: int, kind: str | None
) -> Lazy:
    """A flat buffer; of masters, or weights where those are the masters, for None."""
    parts = []
    for local, start in sorted(starts.items(), key=lambda item: item[1]):
        name = members[local]
        own = kind or (Kind.main if Kind.main in made.kinds[name] else Kind.weight)
        value = made.tensor(name, own, rank)
        parts.append((start, lazy.cast(value, torch.float32) if kind is None else value))
    return lazy.flat_of(parts, total)
