"""Options of ``dp=megatron_ddp``, ``hp_fsdp``, ``hp_hsdp``, ``torch_fsdp2`` and ``megatron_fsdp``."""

from dataclasses import dataclass

from hp_muon_plugin.config.choices import DataParallelName, FloatDtype, MegatronSharding, OuterMode, ShardLayout
from hp_muon_plugin.config.ranges import number


@dataclass
class DataParallel:
    """How gradients are averaged over data-parallel ranks: megatron-core's own wrapper."""

    name: DataParallelName = DataParallelName.megatron_ddp
    """Which wrapper."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass runs."""
    grad_reduce_in_fp32: bool = True
    """Add up gradients in float32 under bf16 training."""
    bucket_size: int | None = number(None, least=1, example=40000000)
    """Elements per reduction under ``overlap_grad_reduce``; null lets Megatron choose."""


@dataclass
class HpFsdp:
    """Weights, gradients and optimizer state sharded over data-parallel ranks, replicated or not.

    Weights are gathered in ``platform.precision``; masters and optimizer state are float32 ranges.
    """

    name: DataParallelName = DataParallelName.hp_fsdp
    """Which wrapper."""
    replicas: int = number(1, least=1)
    """Copies of the shards (HSDP): data-parallel ranks = ``replicas`` x shard ranks. 1 shards over all of them."""
    outer: OuterMode = OuterMode.replicate
    """What replicas do with gradients: ``replicate`` sums them and updates everything everywhere; ``broadcast``
    updates each weight on one replica, which sends it on; ``shard`` also sums gradients only there."""
    reshard_after_forward: bool | int | None = number(None, least=0, example=True)
    """Whether a unit gives up gathered weights after forward; null: all but the root do. A number keeps them sharded
    over so many neighbours until backward."""
    prefetch: int = number(1, least=0, most=64)
    """Units gathered ahead, in forward and backward. At most ``prefetch + 1`` units are whole at any time."""
    outer_bucket_mib: float | None = number(None, least=0, example=32.0)
    """Least MiB of one reduction between replicas: units are fused until they have as much. Null: an eighth of the
    model's shard, but 1 MiB at least and 32 MiB at most."""
    max_padding: float = number(0.01, least=0, below=1)
    """Share of padding above which a shard may end inside a row. Expert matrices are never cut."""
    shard_layout: ShardLayout = ShardLayout.flat
    """``flat``: contiguous ranges, nothing is copied around collectives; ``per_param``: chunks of dim 0 of each weight,
    as PyTorch's ``fully_shard``, to compare with (not with Muon)."""
    reduce_dtype: FloatDtype = FloatDtype.float32
    """Type in which gradients are accumulated and reduced: ``float32`` or ``bfloat16``."""
    shard_accumulated: bool = False
    """Reduce every micro-batch to shards, instead of keeping whole gradients until the last one of a step: less
    memory, more traffic inside a shard group. Replicas are reduced once either way."""


@dataclass
class TorchFsdp2:
    """PyTorch's ``fully_shard`` through megatron-core's TorchFullyShardedDataParallel, to compare with.

    Gradients are reduced in the model's type and at every micro-batch, as there.
    """

    name: DataParallelName = DataParallelName.torch_fsdp2
    """Which wrapper."""
    reshard_after_forward: bool = True
    """Whether a layer gives up gathered weights after forward (false: megatron-core 0.16 or newer)."""


@dataclass
class MegatronFsdp:
    """megatron-core's own FullyShardedDataParallel with its DistributedOptimizer, to compare with."""

    name: DataParallelName = DataParallelName.megatron_fsdp
    """Which wrapper."""
    sharding: MegatronSharding = MegatronSharding.optim_grads_params
    """What is sharded: Megatron's ``data_parallel_sharding_strategy``."""
    overlap: bool = True
    """Gather and reduce while the model computes: Megatron's ``overlap_grad_reduce`` and ``overlap_param_gather``."""
    replicas: int = number(1, least=1)
    """Copies of the shards. Only 1: see docs/megatron.md for what is wrong with more."""


DpOptions = DataParallel | HpFsdp | TorchFsdp2 | MegatronFsdp
DATA_PARALLEL: dict[str, type[DataParallel] | type[HpFsdp] | type[TorchFsdp2] | type[MegatronFsdp]] = {
    "megatron_ddp": DataParallel,
    "hp_fsdp": HpFsdp,
    "torch_fsdp2": TorchFsdp2,
    "megatron_fsdp": MegatronFsdp,
}
