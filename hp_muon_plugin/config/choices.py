"""The closed choices that options take, one StrEnum each.

Member names equal their values, because OmegaConf looks enum members up by name: so
``optimizer.scale=spectral`` works on the command line, and a wrong value lists the right ones.
"""

from enum import StrEnum


class ScaleMode(StrEnum):
    """How the orthogonal update of an ``(M, N)`` matrix is scaled. Formulas: ``muon/scale.py``."""

    match_rms_adamw = "match_rms_adamw"
    spectral = "spectral"
    shape_scaling = "shape_scaling"
    unit_rms = "unit_rms"
    none = "none"


class Schedule(StrEnum):
    """Named Newton-Schulz coefficient schedules. Values and sources: ``muon/coefficients.py``."""

    keller = "keller"
    you = "you"
    polar_express = "polar_express"
    cans = "cans"
    asym5 = "asym5"
    deepseek_v4 = "deepseek_v4"
    cubic = "cubic"
    custom = "custom"


class FloatDtype(StrEnum):
    """A floating-point type by torch's name."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class TensorParallelMode(StrEnum):
    """How a matrix that is split over tensor-parallel ranks is orthogonalised. All but ``blockwise`` are exact."""

    duplicated = "duplicated"
    distributed = "distributed"
    owner = "owner"
    blockwise = "blockwise"


class Strategy(StrEnum):
    """How ranks that hold parts of a matrix orthogonalise it. Matrices that lie whole on a rank need none."""

    auto = "auto"
    allgather = "allgather"
    allgather_dedup = "allgather_dedup"
    alltoall = "alltoall"
    gram = "gram"


class ClipMode(StrEnum):
    """Which gradients the global-norm clipping scales; the norm is reported for all of them."""

    all = "all"
    adamw_only = "adamw_only"
    none = "none"


class OuterMode(StrEnum):
    """What replicas of a sharded model do with the sum of their gradients."""

    replicate = "replicate"
    broadcast = "broadcast"
    shard = "shard"


class ShardLayout(StrEnum):
    """How parameters are divided over shards."""

    flat = "flat"
    per_param = "per_param"


class NonFinite(StrEnum):
    """What a step with a NaN or infinite gradient does. Either way no weight and no state changes."""

    skip = "skip"
    error = "error"


class MissingGrad(StrEnum):
    """What a trainable parameter without a gradient does, the same on every rank."""

    leave = "leave"
    error = "error"


class PlatformName(StrEnum):
    """Where tensors live. ``auto`` takes npu, then cuda, then cpu."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    npu = "npu"


class Precision(StrEnum):
    """Compute type of the model. Master weights and optimizer state are float32 with both."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Decay(StrEnum):
    """Shape of the learning-rate decay, by Megatron's names where it has them."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class DataKind(StrEnum):
    """Where the training text comes from."""

    pydoc = "pydoc"
    megatron = "megatron"


class DataParallelName(StrEnum):
    """How weights and gradients lie on data-parallel ranks: megatron-core's own wrappers, or sharded by ours."""

    megatron_ddp = "megatron_ddp"
    hp_fsdp = "hp_fsdp"
    torch_fsdp2 = "torch_fsdp2"
    megatron_fsdp = "megatron_fsdp"


class MegatronSharding(StrEnum):
    """What Megatron-FSDP shards, by its own names."""

    optim = "optim"
    optim_grads = "optim_grads"
    optim_grads_params = "optim_grads_params"


class DispatcherType(StrEnum):
    """megatron-core's MoE token dispatchers that run on every platform."""

    alltoall = "alltoall"
    allgather = "allgather"
