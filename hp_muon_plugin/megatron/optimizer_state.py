"""Optimizer state in the forms that megatron-core's checkpoints take."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hp_muon_plugin.muon.optimizer import HpMuonOptimizer
from hp_muon_plugin.muon.routing import Algorithm
from hp_muon_plugin.platform.collectives import gathered_objects

_COMMON_STEP = "common_step"
_OWN_GROUPS = "own_param_groups"
_STEP = "step"


def load_main_params(optimizer: HpMuonOptimizer, mains: Sequence[torch.nn.Parameter], state: dict[str, Any]) -> None:
    """Load optimizer state and float32 masters.

    Args:
        optimizer: Receives the state.
        mains: Masters, in the order in which they were saved.
        state: From ``state_dict`` or a loaded ``sharded_state_dict``.
    """
    inner = dict(state["optimizer"])
    inner["state"] = dict(inner["state"])
    common = inner["state"].pop(_COMMON_STEP, None)
    if _OWN_GROUPS in inner:
        inner["param_groups"] = _groups(inner.pop(_OWN_GROUPS), inner.get("param_groups", ()))
        common = _megatrons_step(state) if common is None else common
    if common is not None:
        for entry in inner["state"].values():
            if "exp_avg" in entry:
                entry["step"] = torch.as_tensor(common, dtype=torch.float32).clone().reshape(())
    optimizer.load_state_dict(inner)
    for main, saved in zip(mains, state.get("main_params", ()), strict=True):
        main.copy_(saved)


def _groups(own: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups to load: what the checkpoint says of each, with the parameters that this rank has in it.

    Megatron's own AdamW orders its groups otherwise, and a run with another number of expert-parallel ranks has others.
    Then each group keeps what this run says of it.
    """
    if [group.get("algorithm") for group in saved] == [group["algorithm"] for group in own]:
        return [{**group, "params": live["params"]} for group, live in zip(saved, own, strict=True)]
    return [{"params": live["params"]} for live in own]


def _megatrons_step(state: dict[str, Any]) -> float | None:
    """Step of Megatron's own AdamW: of one optimizer, or of two chained ones, for dense weights and for experts.

    Fused Adams keep it in groups, and what they loaded and do not use stays behind: the largest is alive.
    """
    holders = [state, *(value for value in state.values() if isinstance(value, dict))]
    holders += [holder["optimizer"] for holder in holders[1:] if isinstance(holder.get("optimizer"), dict)]
    steps = [holder["state"][_COMMON_STEP] for holder in holders if _COMMON_STEP in holder.get("state", ())]
    steps += [group[_STEP] for holder in holders for group in holder.get("param_groups", ()) if _STEP in group]
    return max((float(step) for step in steps), default=None)


def as_megatrons_adamw(state: dict[str, Any], *, has_masters: bool) -> dict[Any, Any]:
    """AdamW's state in the form in which Megatron's own optimizers write and find it.

    Megatron chains an optimizer of dense weights and one of experts where there are expert-parallel ranks, and matches
    groups by their values. Tensors are found by their keys, so that they may all stand in the first.

    Args:
        state: From :func:`sharded_optimizer_state` of an optimizer without Muon.
        has_masters: Whether the model computes in another type than float32.

    Returns:
        The state of one optimizer, or of two by number.
    """
    inner, steps = state["optimizer"], dict(state["optimizer"]["state"])
    groups = [group for group in inner["param_groups"] if group["algorithm"] == Algorithm.adamw]
    shared = {_COMMON_STEP: torch.tensor(steps.pop(_COMMON_STEP))} if _COMMON_STEP in steps else {}
    if shared and _is_fused():
        step = int(shared.pop(_COMMON_STEP))
        groups = [{"bias_correction": True, **group, _STEP: step} for group in groups]
    kinds = [[group for group in groups if bool(group["is_expert_parallel"]) is expert] for expert in (False, True)]
    parts: list[dict[str, Any]] = [{"state": dict(shared), "param_groups": found} for found in kinds if found]
    parts[0]["state"] |= steps
    if has_masters:
        parts = [{"optimizer": part} for part in parts]
        parts[0]["main_params"] = state["main_params"]
    return parts[0] if len(parts) == 1 else dict(enumerate(parts))


def _is_fused() -> bool:
    """Whether Megatron's AdamW is one that counts steps in groups: Transformer Engine's, or Apex's."""
    from megatron.core import optimizer as factory

    return not factory.Adam.__module__.startswith("torch.")


def sharded_optimizer_state(
    state: dict[str, Any],
    pairs: Sequence[tuple[torch.nn.Parameter, torch.nn.Parameter | None]],
    model_state: Any,
    *,
    is_loading: bool,
) -> dict[str, Any]:
    """Give every state tensor the shards of its parameter.

    Args:
        state: From ``state_dict``.
        pairs: Model parameter and its master (None without one), in the optimizer's order.
        model_state: The model's sharded state dict.
        is_loading: Whether it is to be loaded into. Then groups are not asked for, because Megatron merges lists of
            equal length only, and the checkpoint's may be others.

    Returns:
        ``state`` with ShardedTensors; the AdamW step count, which all parameters share, apart.
    """
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
    from megatron.core.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        make_sharded_optimizer_tensor,
        optim_state_to_sharding_state,
    )

    shards = get_param_id_to_sharded_param_map(model_state, (model for model, _ in pairs))
    with_master = [(index, main) for index, (_, main) in enumerate(pairs) if main is not None]
    state["main_params"] = [
        make_sharded_optimizer_tensor(shards[index], main.detach(), prefix="optimizer.state.fp32_param")
        for index, main in with_master
    ]
    inner = state["optimizer"]
    steps = {float(entry["step"]) for entry in inner["state"].values() if "step" in entry}
    assert len(steps) <= 1, f"AdamW step counts differ: {sorted(steps)}"
    own = inner["param_groups"]
    optim_state_to_sharding_state(inner, shards, exclude_keys="step")
    if is_loading:
        del inner["param_groups"]
        inner[_OWN_GROUPS] = LocalNonpersistentObject(own)
    step = _of_all_ranks(max(steps, default=-1.0))
    if step >= 0:
        inner["state"][_COMMON_STEP] = step
    return state


def _of_all_ranks(step: float) -> float:
    """Rank 0 writes what is common to all, and may itself update no parameter with AdamW."""
    if not dist.is_initialized():
        return step
    return float(max(gathered_objects(step, "step counts")))
