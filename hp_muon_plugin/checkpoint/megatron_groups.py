"""Param groups of megatron-core's optimizers: from lists without names to values per parameter, and back.

Megatron's sharded checkpoints say what groups there are, not which parameter is in which. A parameter's group
follows from the rules that built the groups: no weight decay for biases and vectors, expert parameters apart, a
learning rate of their own for embeddings where it is decoupled.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hp_muon_plugin.checkpoint.megatron_names import is_expert

NOT_HYPER = ("params", "step")


def group_of(name: str, dims: int, groups: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The group that a parameter is in, or None if it could be several that differ.

    Args:
        name: Canonical name.
        dims: Its number of dimensions.
        groups: Groups of the optimizer that has its state.
    """
    left = list(groups)
    decays = not (dims <= 1 or name.endswith(".bias"))
    embeds = name.startswith(("embedding.", "output_layer."))
    for key, wanted in (
        ("is_expert_parallel", is_expert(name)),
        ("is_decoupled_lr", embeds),
        ("wd_mult", None),
    ):
        if key == "wd_mult":
            fitting = [group for group in left if (group.get(key, 1.0) != 0.0) == decays]
        else:
            fitting = [group for group in left if bool(group.get(key, False)) == wanted]
        left = fitting or left
    unclear = any(
        hyper_of(group) != hyper_of(left[0]) or group.get("step") != left[0].get("step") for group in left[1:]
    )
    return None if unclear or not left else left[0]


def hyper_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a group that belong to each of its parameters."""
    return {key: value for key, value in group.items() if key not in NOT_HYPER}


def grouped(
    names: Iterable[str], hyper: Mapping[str, Mapping[str, Any]], *, expert_parallel: bool
) -> list[tuple[dict[str, Any], list[str]]]:
    """Groups of parameters with equal values.

    Args:
        names: Of one optimizer, in its order.
        hyper: Values by name.
        expert_parallel: Whether routed experts are groups of their own, as Megatron has them with EP > 1.

    Returns:
        Values and names of each group, in Megatron's order: decaying parameters first within dense and expert.
    """
    found: list[tuple[dict[str, Any], list[str]]] = []
    for name in names:
        values = dict(hyper.get(name, {}))
        if "is_expert_parallel" in values or expert_parallel:
            values["is_expert_parallel"] = expert_parallel and is_expert(name)
        for known, members in found:
            if known == values:
                members.append(name)
                break
        else:
            found.append((values, [name]))
    return sorted(found, key=lambda item: (bool(item[0].get("is_expert_parallel")), item[0].get("wd_mult", 1.0) == 0.0))
