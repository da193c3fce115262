"""The parameters of a model as measurements count them: each element once over all ranks, whoever updates it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.megatron.groups import MegatronGroups, megatron_groups
from hp_muon_plugin.megatron.norms import counts_here
from hp_muon_plugin.megatron.optimizer import HpMuonMegatronOptimizer
from hp_muon_plugin.megatron.specs import chunk_specs
from hp_muon_plugin.muon.routing import Algorithm
from hp_muon_plugin.platform.collectives import all_reduce_sum


@dataclass(frozen=True, slots=True)
class MeasuredParam:
    """What this rank updates of one parameter.

    Attributes:
        spec: The whole parameter.
        main: What the optimizer updates, float32.
        is_counted: False on all but one of the tensor-parallel ranks that hold the same values.
        is_muon: Whether Muon updates it.
        start: First element of it that this rank holds, of its tensor-parallel part.
    """

    spec: ParamSpec
    main: torch.nn.Parameter
    is_counted: bool
    is_muon: bool
    start: int


def measured_params(chunks: Sequence[torch.nn.Module], optimizer: Any) -> tuple[list[MeasuredParam], MegatronGroups]:
    """The parameters that this rank updates, and the groups over which they add up.

    Args:
        chunks: Wrapped model chunks.
        optimizer: A MegatronOptimizer, ours or Megatron's.

    Returns:
        Parameters in the optimizer's order, frozen ones left out; and the groups.
    """
    if isinstance(optimizer, HpMuonMegatronOptimizer):
        ours = [
            MeasuredParam(
                counted.spec,
                pair.main,
                counted.is_counted,
                counted.algorithm is Algorithm.muon,
                getattr(getattr(pair.model, "hp_shard", None), "start", 0),
            )
            for pair, counted in optimizer.parts
        ]
        return ours, optimizer.groups
    groups = megatron_groups()
    theirs = [
        MeasuredParam(spec, getattr(param, "main_param", param), counts_here(param, spec, groups), False, 0)
        for param, spec in chunk_specs(chunks, HpMuon(), groups).items()
        if spec.trainable
    ]
    return theirs, groups


def summed(dense: torch.Tensor, expert: torch.Tensor, groups: MegatronGroups) -> torch.Tensor:
    """Add up contributions of all ranks to the whole model. All ranks must call it.

    Args:
        dense: This rank's contribution from dense weights.
        expert: The same from expert weights; of the same shape.
        groups: From :func:`measured_params`.

    Returns:
        The sum of both over the model, the same on every rank.
    """
    total = torch.zeros_like(dense)
    for is_expert, axes in groups.stats:
        part = (expert if is_expert else dense).clone()
        for axis in axes:
            if axis.size > 1:
                all_reduce_sum(
                    part, axis
                )  # float32, a few per parameter kind, on measured steps; the host waits on CPU
        total += part
    return total
