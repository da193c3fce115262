"""What a user chooses about a sharded module."""

from dataclasses import dataclass

import torch

from hp_muon_plugin.config.choices import ShardLayout


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """Types of a unit's gathered weights, reductions and outputs.

    Attributes:
        param_dtype: Of gathered weights, in which the module computes. None: as the parameters are.
        reduce_dtype: In which gradients are accumulated and reduced. None: ``param_dtype``.
        output_dtype: To which floating-point outputs of the module are cast. None: not cast.
        cast_forward_inputs: Whether floating-point inputs are cast to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True, slots=True)
class UnitOptions:
    """Options of one call of :func:`hp_fully_shard`.

    Attributes:
        reshard_after_forward: Whether gathered weights are given up after forward. None: yes, except for
            the root, whose weights backward needs first. A number: each rank keeps as much as if they
            were sharded over so many neighbours, from which backward gathers them.
        precision: Types.
        divisor: By what summed gradients are divided. None: the number of ranks that share them.
        max_padding: Share of padding above which rows may be cut; see ``layout/bucket_planner.py``.
        shard_layout: How parameters are divided over shards.
    """

    reshard_after_forward: bool | int | None = None
    precision: MixedPrecision = MixedPrecision()
    divisor: float | None = None
    max_padding: float = 0.01
    shard_layout: ShardLayout = ShardLayout.flat


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """Options of a whole model, given to the root.

    Attributes:
        prefetch: Units that are gathered ahead, in forward and in backward. At most ``prefetch + 1`` units
            are held whole at any time, besides the root and units that contain others.
        outer_bucket_bytes: Least size of one reduction between replicas: neighbouring units are fused. None: an
            eighth of the model's shard, but 1 MiB at least and 32 MiB at most.
    """

    prefetch: int = 1
    outer_bucket_bytes: int | None = None
