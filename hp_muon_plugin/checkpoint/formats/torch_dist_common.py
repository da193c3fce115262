"""What ``torch_dist`` keeps beside tensors: optimizers and their groups, arguments, random and extra state."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hp_muon_plugin.checkpoint.canonical import Key, Kind, Momentum, RunState, Source, Target
from hp_muon_plugin.checkpoint.formats.model_args import model_args
from hp_muon_plugin.checkpoint.formats.random_states import by_place
from hp_muon_plugin.checkpoint.formats.stages import sizes_of
from hp_muon_plugin.checkpoint.megatron_groups import grouped
from hp_muon_plugin.checkpoint.megatron_names import Place, Style, is_expert, place
from hp_muon_plugin.checkpoint.run_values import namespace, random_state
from hp_muon_plugin.checkpoint.step_counts import FACT, StepPlace, wanted_place, with_step

RECORD = "hp_muon"
"""Key of the common state under which we keep what Megatron has no place for. Its loader ignores it."""
_RECORDED = ("data", "vocab_size", "consumed_samples")
_FIXED = (Kind.weight, Kind.main, Kind.buffer)
_LINEAR = re.compile(
    r"(.+\.layers\..+\.(?:linear_(?:proj|qkv|fc1|fc2|q|kv|q_proj|q_down_proj|q_up_proj|kv_down_proj|kv_up_proj)|eh_proj))"
    r"\.weight\Z"
)
_RANK = re.compile(r"pp(\d+)\.tp(\d+)(?:\.(?:ep\d+\.?)?(?:dp(\d+))?)?\Z")


@dataclass(frozen=True, slots=True)
class Member:
    """One optimizer of the chain.

    Attributes:
        is_muon: Whether its state is momentum.
        names: Its parameters.
        is_ours: Whether it is this plugin's, which steps every parameter and tells groups apart by ``algorithm``.
    """

    is_muon: bool
    names: tuple[str, ...]
    is_ours: bool = False


def members(source: Source, expert_parallel: bool) -> list[Member]:
    """Optimizers in Megatron's order: Muon before Adam, dense before expert.

    Args:
        source: The checkpoint.
        expert_parallel: Whether routed experts have optimizers of their own.
    """
    kinds: dict[str, set[str]] = {}
    for key in source.tensors():
        kinds.setdefault(key.name, set()).add(key.kind)
    sorted_names: dict[tuple[bool, bool], list[str]] = {}
    for name, found in kinds.items():
        if not found - set(_FIXED):
            continue
        is_adam = Kind.momentum not in found
        sorted_names.setdefault((is_adam, expert_parallel and is_expert(name)), []).append(name)
    hyper = source.state().hyper
    if any("algorithm" in hyper.get(name, {}) for name in kinds):
        every = [name for names in sorted_names.values() for name in names]
        return [Member(True, tuple(name for name in kinds if name in set(every)), is_ours=True)]
    return [Member(not is_adam, tuple(names)) for (is_adam, _), names in sorted(sorted_names.items())]


def groups(member: Member, state: RunState, source: Source, expert_parallel: bool) -> list[dict[str, Any]]:
    """Param groups of an optimizer, as Megatron stores them.

    Args:
        member: The optimizer.
        state: Run state of the source.
        source: The checkpoint.
        expert_parallel: Whether routed experts are groups of their own.
    """
    infos = source.tensors()
    hyper = {name: _completed(name, state, len(infos[Key(name, Kind.weight)].shape)) for name in member.names}
    if not (member.is_muon or member.is_ours) and any(key.kind == Kind.momentum for key in infos):
        for name in (name for name in member.names if "wd_mult" not in state.hyper.get(name, {})):
            hyper[name].setdefault("optimizer", "adam")  # beside Muon's, Megatron's other groups name Adam
    found = []
    for values, names in grouped(member.names, hyper, expert_parallel=expert_parallel):
        steps = {state.steps[name] for name in names if name in state.steps}
        found.append(dict(values, step=max(steps)) if steps else dict(values))
    return found


def group_lists(chain: list[Member], source: Source, expert_parallel: bool) -> list[list[dict[str, Any]]]:
    """Param groups of every optimizer.

    Megatron's loader wants as many groups as its optimizers have, also where two have the same values: lists that
    the source had stay as they are while the optimizers are the same.

    Args:
        chain: The optimizers.
        source: The checkpoint.
        expert_parallel: Whether routed experts are groups of their own.
    """
    state = source.state()
    had = state.model.get("param_groups")
    apart = expert_parallel and any(is_expert(name) for member in chain for name in member.names)
    if isinstance(had, list) and len(had) == len(chain) and bool(state.model.get("experts_apart")) == apart:
        return [[dict(group) for group in items] for items in had]
    return [groups(member, state, source, expert_parallel) for member in chain]


def uneven_steps(source: Source) -> bool:
    """Whether parameters have done different numbers of steps, for which Megatron has one place only."""
    return len(set(source.state().steps.values())) > 1


def _completed(name: str, state: RunState, dims: int) -> dict[str, Any]:
    decays = not (dims <= 1 or name.endswith(".bias"))
    missing: dict[str, Any] = {
        **{"wd_mult": float(decays), "lr_mult": 1.0, "is_decoupled_lr": False, "is_expert_parallel": False},
        **{key: state.scheduler[key] for key in ("max_lr", "min_lr") if key in state.scheduler},
    }
    values = state.hyper.get(name, {})
    return {**{key: value for key, value in missing.items() if key not in values}, **values}


def optimizer_state(
    chain: list[Member], lists: list[list[dict[str, Any]]], sharding: str, float32: bool, place: StepPlace
) -> dict[Any, Any]:
    """The ``optimizer`` entry of the common state.

    Args:
        chain: The optimizers.
        lists: Param groups of each.
        sharding: Form of the state.
        float32: Whether weights are float32, which have an optimizer without masters.
        place: Where Adam's step counts go without a distributed optimizer, which has them in its groups anyhow.
    """
    found: list[dict[str, Any]] = []
    for member, items in zip(chain, lists, strict=True):
        distributed = not member.is_muon and sharding.endswith("reshardable")
        if sharding.endswith("dp_reshardable") and distributed:
            found.append({"param_state_sharding_type": "dp_reshardable"})
            continue
        if distributed:
            kind = "fully_reshardable"
            groups = [with_step(group, place) for group in items]
            found.append({"optimizer": {"param_groups": groups}, "param_state_sharding_type": kind})
            continue
        steps = [group["step"] for group in items if "step" in group]
        inner: dict[str, Any] = {}
        if place is StepPlace.parameter or member.is_ours:
            inner = {"state": {"common_step": torch.tensor(max(steps))}} if steps else {}
            inner["param_groups"] = [{key: value for key, value in group.items() if key != "step"} for group in items]
        else:
            inner["param_groups"] = [with_step(group, place) for group in items]
        found.append(inner if float32 and not member.is_ours else {"optimizer": inner})
    whole: dict[Any, Any] = dict(enumerate(found))
    return found[0] if len(found) == 1 else whole


def common_state(
    source: Source,
    target: Target,
    optimizer: dict[Any, Any],
    sharding: str,
    momentum: Momentum | None,
    more_args: Mapping[str, Any],
) -> dict[str, Any]:
    """The common state.

    Args:
        source: The checkpoint.
        target: Parallel sizes that the arguments name.
        optimizer: From :func:`optimizer_state`; empty if there is none.
        sharding: Form of the state.
        momentum: Convention of the momentum buffers as written.
        more_args: Further arguments.
    """
    state = source.state()
    sizes = {
        **sizes_of(source, target),
        "ckpt_format": "torch_dist",
        "iteration": state.iteration,
        "consumed_train_samples": state.consumed_samples or 0,
        **more_args,
    }
    content: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": sharding != "chained"}
    if sharding.endswith("reshardable"):
        content["distrib_optim_sharding_type"] = sharding.removeprefix("layer_wise_")
        content["distrib_optim_fully_reshardable_mem_efficient"] = False
    elif sharding == "layer_wise":
        content["distrib_optim_sharding_type"] = "dp_reshardable"  # what makes the loader put chained_ before keys
    found: dict[str, Any] = {
        "args": namespace({**state.args, **model_args(source, target), **sizes}),
        "checkpoint_version": 3.0,
        "iteration": state.iteration,
        **({"optimizer": optimizer} if optimizer else {}),
        **({"opt_param_scheduler": dict(state.scheduler)} if state.scheduler else {}),
        "num_floating_point_operations_so_far": state.flops or 0,
        "content_metadata": content,
    }
    record: dict[str, Any] = {"version": 1, "momentum": None if momentum is None else str(momentum)}
    record |= {name: getattr(state, name) for name in _RECORDED}
    found[RECORD] = record | {FACT: str(wanted_place(source, target))}
    return found


def apply_record(state: RunState, record: Any) -> None:
    """Take over what :func:`common_state` recorded.

    Args:
        state: Changed.
        record: From the common state, or None.
    """
    if not isinstance(record, Mapping) or record.get("version") != 1:
        return
    for name in _RECORDED:
        if record.get(name) is not None:
            setattr(state, name, record[name])
    if record.get(FACT) is not None:
        state.model[FACT] = record[FACT]
    if record.get("momentum") is not None:
        state.momentum = Momentum(record["momentum"])


def random_objects(state: RunState, target: Target) -> tuple[dict[str, Any], list[str]]:
    """Random states of the target's ranks.

    Megatron asks for one per pipeline and tensor rank, 0.16 with expert parallelism for one per data rank as well.

    Returns:
        Objects by key, and the (pipeline, tensor) ranks without one.
    """
    by_rank: dict[tuple[int, int], dict[int | None, Any]] = {}
    for name, item in by_place(state).items():
        match = _RANK.match(name)
        if match and isinstance(item, Mapping) and "states" in item:
            rank = by_rank.setdefault((int(match[1]), int(match[2])), {})
            rank.setdefault(int(match[3]) if match[3] else None, item["states"])
    found: dict[str, Any] = {}
    missing = []
    for pipeline in range(target.pp):
        for tensor in range(target.tp):
            states = by_rank.get((pipeline, tensor), {})
            if not states:
                missing.append(f"({pipeline}, {tensor})")
                continue
            first = states[None] if None in states else states[min(key for key in states if key is not None)]
            data = sorted(key for key in states if key is not None)
            of_all = [random_state(states[index]) for index in data]
            is_per_data_rank = bool(state.args.get("data_parallel_random_init")) and of_all
            whole = of_all if is_per_data_rank else [random_state(first)]
            found[f"rng_state/shard_{pipeline}.{tensor}_{target.pp}.{target.tp}"] = [whole]
            for index in data:
                key = f"rng_state/shard_{pipeline}.{tensor}.{index}_{target.pp}.{target.tp}.{len(data)}"
                found[key] = [[random_state(states[index])]]
    return found, missing


def extra_state_keys(
    weights: Iterable[str], style: Style, moe_layers: frozenset[str], known: list[str] | None
) -> Iterator[str]:
    """Keys of the empty extra states that Megatron's loader asks for.

    Args:
        weights: Canonical names of weights.
        style: How keys are written.
        moe_layers: Prefixes of layers with experts.
        known: Modules that had one in the source, without layer numbers; None for those of the local specification.
    """
    shards: dict[str, set[tuple[int, ...]]] = {}
    layers: dict[str, set[int]] = {}
    for name in weights:
        layer = re.match(r"(.+?\.layers\.)(\d+)\.", name)
        if layer:
            layers.setdefault(layer[1], set()).add(int(layer[2]))
        match = _LINEAR.match(name)
        if match:
            where = place(name, style, moe_layers)
            module = where.key.removesuffix(".weight")
            if known is None or _numberless(module) in known:
                shards.setdefault(module, set()).add(where.index)
    for module in set(known or ()) - {_numberless(module) for module in shards}:
        for prefix, numbers in layers.items():
            if module.startswith(prefix):
                for number in numbers:
                    name = f"{prefix}{number}.{module.removeprefix(prefix)}"
                    where = place(name, style, moe_layers) if style.stacked else Place(name, ())
                    shards.setdefault(where.key, set()).add(where.index)
        if ".layers." not in module:
            shards.setdefault(module, set()).add(())
    for module, found in shards.items():
        sizes = [max(index[dim] for index in found) + 1 for dim in range(len(next(iter(found))))]
        for index in sorted(found):
            yield f"{module}._extra_state/shard_{_dotted(index) or 0}_{_dotted(sizes) or 1}"


def _numberless(module: str) -> str:
    return re.sub(r"\.layers\.\d+\.", ".layers.", module)


def _dotted(numbers: Iterable[int]) -> str:
    return ".".join(map(str, numbers))
