"""Megatron's parameter groups: which parameters belong to which, where a checkpoint does not say it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hp_muon_plugin.checkpoint.formats import names
from hp_muon_plugin.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter as Megatron's optimizer sees it.

    Attributes:
        name: Its name; a number of its model chunk and a slash may stand before it.
        shape: Its shape on the rank.
        expert_parallel: Whether it is on some ranks only: a routed expert with more than one expert-parallel rank.
    """

    name: str
    shape: tuple[int, ...]
    expert_parallel: bool

    @property
    def module_name(self) -> str:
        """Its name in the chunk."""
        return self.name.rpartition("/")[2]


def is_muon(group: Mapping[str, Any]) -> bool:
    """Whether a group is updated by orthogonalisation: it has a momentum and no betas."""
    return momentum_decay(group) is not None and "betas" not in group


def momentum_decay(group: Mapping[str, Any]) -> Any:
    """Decay of a group's momentum, which earlier Emerging-Optimizers call ``momentum_beta``; None without one."""
    return group.get("momentum", group.get("momentum_beta"))


def muon_takes(param: Param) -> bool:
    """Whether Megatron gives a parameter to Muon when Muon is the optimizer."""
    embedding = param.module_name.startswith(("embedding.", "output_layer."))
    return len(param.shape) == 2 and not embedding


def members(
    groups: Sequence[Mapping[str, Any]], params: Sequence[Param], args: Mapping[str, Any], where: str
) -> list[list[str]]:
    """The parameters of each group, in the order in which Megatron has them.

    Args:
        groups: Groups of all optimizers of a rank.
        params: Its parameters, as ``named_parameters()`` has them.
        args: Megatron's arguments.
        where: File, for messages.

    Returns:
        Names, one list for each group.

    Raises:
        CheckpointError: If no group or several different ones can have a parameter.
    """
    found: list[list[str]] = [[] for _ in groups]
    any_muon = any(is_muon(group) for group in groups)
    for param in params:
        fits = [index for index, group in enumerate(groups) if _fits(group, param, args, any_muon)]
        if not fits or any(groups[index] != groups[fits[0]] for index in fits[1:]):
            which = "no parameter group fits" if not fits else f"parameter groups {fits} all fit"
            raise CheckpointError(
                f"{where}: {which} {param.name}; the checkpoint does not name the members of its groups\n"
                "  fix: convert without optimizer state, or save in torch_dist with fully_reshardable first"
            )
        found[fits[0]].append(param.name)
    return found


def no_decay(param: Param, args: Mapping[str, Any]) -> bool:
    """Whether Megatron leaves a parameter out of weight decay."""
    if args.get("apply_wd_to_qk_layernorm") and ("q_layernorm." in param.name or "k_layernorm." in param.name):
        return False
    return param.name.endswith(".bias") or len(param.shape) == 1


def _fits(group: Mapping[str, Any], param: Param, args: Mapping[str, Any], any_muon: bool) -> bool:
    if group.get("is_expert_parallel", False) != param.expert_parallel:
        return False
    if "wd_mult" in group and (group["wd_mult"] == 0) != no_decay(param, args):
        return False
    if any_muon and is_muon(group) != muon_takes(param):
        return False
    decoupled = args.get("decoupled_lr") is not None and param.module_name in (names.EMBEDDING, names.OUTPUT)
    return bool(group.get("is_decoupled_lr", False)) == decoupled
