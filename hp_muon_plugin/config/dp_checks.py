"""What the options of data parallelism must be together, and with the model and the ranks."""

from collections.abc import Iterator

from hp_muon_plugin.config.choices import FloatDtype, MissingGrad, OuterMode, ShardLayout
from hp_muon_plugin.config.data_parallel import DataParallel, HpFsdp, MegatronFsdp, TorchFsdp2
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.peer_checks import megatron_fsdp_errors, torch_fsdp2_errors
from hp_muon_plugin.config.topology_checks import data_parallel_size
from hp_muon_plugin.config.trainer import Topology, Train
from hp_muon_plugin.errors import ConfigError


def has_expert_ranks(config: Train) -> bool:
    """Whether routed experts lie on other ranks than dense weights.

    Args:
        config: Options.

    Returns:
        True if their gradients are averaged over ranks of their own.
    """
    topology = config.topology
    return config.model.moe is not None and (topology.ep > 1 or topology.etp != topology.tp)


def expert_data_parallel_size(topology: Topology, world_size: int) -> int:
    """Ranks that hold the same routed experts.

    Args:
        topology: Parallel sizes; must divide ``world_size``.
        world_size: Ranks of the job.

    Returns:
        ``world_size / (ep * etp * pp)``.
    """
    return world_size // (topology.ep * topology.etp * topology.pp)


def dp_errors(config: Train, world_size: int) -> Iterator[ConfigError]:
    """Check options that depend on each other.

    Args:
        config: Options, every number of ``dp``, ``topology`` and ``model`` in its range.
        world_size: Ranks of the job.

    Yields:
        One error for each thing that is wrong.
    """
    if isinstance(config.dp, DataParallel):
        yield from _ddp_errors(config.dp)
        return
    if isinstance(config.dp, TorchFsdp2):
        yield from torch_fsdp2_errors(config)
        return
    if isinstance(config.dp, MegatronFsdp):
        yield from megatron_fsdp_errors(config, config.dp)
        return
    yield from lone_errors(config.dp, "dp")
    yield from _optimizer_errors(config)
    topology = config.topology
    if world_size % (topology.tp * topology.pp) or world_size % (topology.ep * topology.etp * topology.pp):
        return  # the ranks cannot be divided at all, which is an error of the topology
    yield from _replica_errors(config, config.dp, world_size)
    yield from _reshard_errors(config, config.dp, data_parallel_size(topology, world_size))


def _ddp_errors(dp: DataParallel) -> Iterator[ConfigError]:
    if dp.bucket_size is not None and not dp.overlap_grad_reduce:
        yield ConfigError(
            "dp.bucket_size",
            dp.bucket_size,
            "Megatron reduces all gradients at once unless dp.overlap_grad_reduce=true, and would ignore it",
            "set dp.overlap_grad_reduce=true, or leave dp.bucket_size out",
        )


def lone_errors(dp: HpFsdp, prefix: str) -> Iterator[ConfigError]:
    """Check options that depend on each other alone.

    Args:
        dp: Options, every number in its range.
        prefix: What stands before the names in messages.

    Yields:
        One error for each thing that is wrong.
    """
    if dp.reduce_dtype is FloatDtype.float16:
        yield ConfigError(
            f"{prefix}.reduce_dtype",
            "float16",
            "sums of gradients leave its range",
            f"set {prefix}.reduce_dtype=float32 or {prefix}.reduce_dtype=bfloat16",
        )
    if dp.replicas == 1 and dp.outer is not OuterMode.replicate:
        yield ConfigError(
            f"{prefix}.outer",
            dp.outer,
            f"says what replicas do, and {prefix}.replicas=1 has none",
            f"set {prefix}.replicas=2 or more, or {prefix}.outer=replicate",
        )


def _optimizer_errors(config: Train) -> Iterator[ConfigError]:
    if isinstance(config.optimizer, HpMuon) and config.optimizer.missing_grad is MissingGrad.error:
        yield ConfigError(
            "optimizer.missing_grad",
            "error",
            "dp=hp_fsdp reduces a zero for a parameter without gradient, and cannot tell it from one",
            "set optimizer.missing_grad=leave, or take dp=megatron_ddp",
        )
    is_chunked = isinstance(config.dp, HpFsdp) and config.dp.shard_layout is ShardLayout.per_param
    if is_chunked and isinstance(config.optimizer, HpMuon):
        yield ConfigError(
            "dp.shard_layout", "per_param", "hp_muon works on whole matrices of the flat layout", "use flat, or adamw"
        )


def _replica_errors(config: Train, dp: HpFsdp, world_size: int) -> Iterator[ConfigError]:
    kinds = [("data-parallel", data_parallel_size(config.topology, world_size))]
    if has_expert_ranks(config):
        kinds.append(("expert-data-parallel", expert_data_parallel_size(config.topology, world_size)))
    for kind, size in kinds:
        if size % dp.replicas:
            choices = [n for n in range(1, world_size + 1) if all(other % n == 0 for _, other in kinds)]
            yield ConfigError(
                "dp.replicas",
                dp.replicas,
                f"the {size} {kind} ranks cannot be divided into as many replicas",
                f"choose among {', '.join(map(str, choices))}" + (" (with dp=hp_fsdp for 1)" if choices == [1] else ""),
            )
            return
    if config.model.tie_embeddings and config.topology.pp > 1 and dp.outer is not OuterMode.replicate:
        yield ConfigError(
            "dp.outer",
            dp.outer,
            "the first and the last pipeline stage hold the tied embedding, and replicas that own it may differ there",
            "set dp.outer=replicate, or model.tie_embeddings=false",
        )


def _reshard_errors(config: Train, dp: HpFsdp, dp_size: int) -> Iterator[ConfigError]:
    size = dp.reshard_after_forward
    if size is None or isinstance(size, bool):
        return
    if has_expert_ranks(config):
        yield ConfigError(
            "dp.reshard_after_forward",
            size,
            "a number needs all weights of a layer on the same ranks, and routed experts have ranks of their own",
            "set dp.reshard_after_forward=true or false",
        )
    shards = dp_size // dp.replicas
    if size < 2 or shards % size:
        yield ConfigError(
            "dp.reshard_after_forward",
            size,
            f"does not divide the {shards} ranks that share a shard group",
            "set true, false, or a divisor above 1",
        )
