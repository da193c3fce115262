"""Which data-parallel rank has which parameter under megatron-core's layer-wise optimizer without buffer layout.

Each rank of a run writes a file ``layer_wise_optimizer_<data-parallel rank>.pt`` into the folder of its model-parallel
rank. The file has the whole optimizer with the members of its groups thinned out: parameters of all groups, sorted by
size, are dealt to the ranks to and fro. Files name no parameter, so that the deal is repeated here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hp_muon_plugin.checkpoint.canonical import Source, Target
from hp_muon_plugin.checkpoint.formats.group_members import is_muon
from hp_muon_plugin.checkpoint.formats.stages import PIPELINES
from hp_muon_plugin.errors import ConfigError

PREFIX = "layer_wise_optimizer_"
DATA = "data_parallel_size"
CONTEXT = "context_parallel_size"
IS_USED = "use_layer_wise_distributed_optimizer"
Groups = list[tuple[dict[str, Any], list[str]]]


def file_of(data: int) -> str:
    """Name of a data-parallel rank's file."""
    return f"{PREFIX}{data}.pt"


@dataclass(frozen=True, slots=True)
class Shares:
    """Data-parallel ranks of a run, and where megatron-core places them (its order of ranks is tp-cp-ep-dp-pp).

    Attributes:
        data: Data-parallel ranks.
        tensors: Tensor-parallel ranks.
        inside: Tensor-parallel ranks inside an expert.
        experts: Expert-parallel ranks.
    """

    data: int
    tensors: int = 1
    inside: int = 1
    experts: int = 1

    @property
    def divides(self) -> bool:
        """Whether experts can be on so many ranks."""
        return self.tensors * self.data % (self.inside * self.experts) == 0

    @property
    def expert_data(self) -> int:
        """Ranks that share an expert's state."""
        return self.tensors * self.data // (self.inside * self.experts)

    def expert_of(self, tensor: int, data: int) -> int:
        """Expert-parallel rank of a rank, by which its folder is called."""
        return (tensor + self.tensors * data) // self.inside % self.experts

    def expert_data_of(self, tensor: int, data: int) -> int:
        """Its place among those that share an expert's state."""
        return (tensor + self.tensors * data) // (self.inside * self.experts)

    def in_folder(self, tensor: int, expert: int) -> list[int]:
        """Data-parallel ranks whose files are in a folder."""
        return [data for data in range(self.data) if self.expert_of(tensor, data) == expert]


@dataclass(frozen=True, slots=True)
class Deal:
    """Members of each group by rank: of dense groups by data-parallel rank, of experts' by rank among their own."""

    dense: list[list[list[str]]]
    expert: list[list[list[str]]]
    of_experts: list[bool]

    def share(self, data: int, expert_data: int) -> list[list[str]]:
        """Members of each group on a rank."""
        both = zip(self.dense[data], self.expert[expert_data], self.of_experts, strict=True)
        return [theirs if of_experts else ours for ours, theirs, of_experts in both]


def dealt(
    groups: Sequence[Mapping[str, Any]], members: Sequence[Sequence[str]], numels: Mapping[str, int], shares: Shares
) -> Deal:
    """Repeat the deal of ``LayerWiseDistributedOptimizer``.

    Args:
        groups: Values of the groups of all optimizers, in its order.
        members: Parameters of each, in the model's order.
        numels: Elements that the model-parallel rank has of each.
        shares: The ranks.
    """
    of_experts = [bool(group.get("is_expert_parallel", False)) for group in groups]
    counts = {False: shares.data, True: shares.expert_data}
    found: dict[bool, list[list[list[str]]]] = {
        expert: [[[] for _ in groups] for _ in range(count)] for expert, count in counts.items()
    }
    order = [(name, index) for index, group in enumerate(members) for name in group]
    if shares.data > 1:  # one rank keeps the model's order
        order.sort(key=lambda item: numels[item[0]])
    turns = {expert: [*range(count), *reversed(range(count))] for expert, count in counts.items()}
    at = {False: 0, True: 0}
    for name, index in order:
        expert = of_experts[index]
        found[expert][turns[expert][at[expert] % len(turns[expert])]][index].append(name)
        at[expert] += 1
    return Deal(found[False], found[True], of_experts)


def data_ranks(source: Source, target: Target, inside: int) -> Shares | None:
    """Ranks of the run that will load: as the option says, or as the source had them if its mesh is the same.

    Args:
        source: What is written.
        target: Its sizes, and the option.
        inside: Tensor-parallel ranks inside an expert.

    Returns:
        The ranks; None if neither says how many.

    Raises:
        ConfigError: If experts do not divide among them.
    """
    args, given = source.state().args, target.options.get(DATA)
    sizes = ("tensor_model_parallel_size", target.tp), (PIPELINES, target.pp), ("expert_model_parallel_size", target.ep)
    same = all((args.get(name) or 1) == size for name, size in sizes) and (args.get(CONTEXT) or 1) == 1
    count = int(given) if given is not None else args.get(DATA) if same else None
    if not isinstance(count, int):
        return None
    shares = Shares(count, target.tp, inside, target.ep)
    if not shares.divides:
        unit = inside * target.ep // target.tp or 1
        raise ConfigError(
            f"--option {DATA}",
            count,
            f"{target.tp * count} ranks of a stage cannot be divided by {inside * target.ep} that experts are on",
            f"choose a multiple of {unit}",
        )
    return shares


def in_layer_wise_order(parts: Sequence[Groups], args: Mapping[str, Any]) -> list[Groups]:
    """Groups of each optimizer as megatron-core chains and orders them under its layer-wise optimizer.

    Muon's are one optimizer, experts' included; so are the others' since groups name their ``optimizer`` (0.18).
    Groups are sorted by what overrules the options, dense before expert.

    Args:
        parts: Groups of each optimizer where experts' are apart.
        args: Megatron's arguments.
    """
    chain: dict[tuple[bool, bool], Groups] = {}
    for part in parts:
        for values, owned in part:
            apart = bool(values.get("is_expert_parallel")) and not is_muon(values) and "optimizer" not in values
            chain.setdefault((not is_muon(values), apart), []).append((values, owned))
    return [sorted(groups, key=lambda group: _rank_of(group[0], args)) for _, groups in sorted(chain.items())]


def _rank_of(values: Mapping[str, Any], args: Mapping[str, Any]) -> tuple[bool, list[tuple[str, Any]], bool]:
    found = {key: values[key] for key in ("optimizer",) if key in values}
    if values.get("wd_mult", 1.0) != 1.0:
        found["wd_mult"] = values["wd_mult"]
    if args.get("decoupled_lr") is not None and values.get("max_lr") == args["decoupled_lr"]:
        found["max_lr"] = values["max_lr"]
        found |= {"min_lr": values["min_lr"]} if args.get("decoupled_min_lr") is not None else {}
    return bool(found), sorted(found.items()), bool(values.get("is_expert_parallel"))
