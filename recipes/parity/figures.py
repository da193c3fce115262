"""What is compared with what, and reading the logs of these runs.

Only the standard library: the README's figures are checked with these functions by a test.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

LOGS = Path(__file__).parent / "logs"
LOSS = "loss/train"

_REPLICAS = ("dp=hp_hsdp", "dp.replicas=2")
WRAPPERS: dict[str, tuple[str, ...]] = {
    "megatron_ddp": ("dp=megatron_ddp",),
    "hp_fsdp": ("dp=hp_fsdp",),
    "hp_hsdp_replicate": (*_REPLICAS, "dp.outer=replicate"),
    "hp_hsdp_broadcast": (*_REPLICAS, "dp.outer=broadcast"),
    "hp_hsdp_shard": (*_REPLICAS, "dp.outer=shard"),
}
"""Overrides by the name of a run: on 4 ranks, HSDP as 2 replicas of 2 shards."""
_TORCH = {"torch_fsdp2": ("dp=torch_fsdp2",)}
_MEGATRON = {"megatron_fsdp": ("dp=megatron_fsdp",)}
_DENSE, _FP32 = ("model.moe=null",), ("platform.precision=fp32",)
_BF16 = ("platform.precision=bf16", "run.eval_interval=250")
_SMALL = ("model.hidden_size=32", "model.seq_length=32", "model.moe.num_experts=4", "model.moe.ffn_hidden_size=32")
_THREE = {run: WRAPPERS[run] for run in ("megatron_ddp", "hp_fsdp", "hp_hsdp_shard")}
_EXACT = ("topology.ranks=2", "run.micro_batch_size=4", "optimizer=adamw", "optimizer.clip_grad=0")
"""Two numbers have one sum, whoever adds them; and no norm, which is a sum of other parts with shards, scales them."""
_CONTROL = {"megatron_ddp_2_ranks": ("dp=megatron_ddp", "topology.ranks=2")}
"""Megatron's own wrapper twice: the same micro-batches, summed by two ranks instead of four."""
STRATEGIES = ("allgather", "allgather_dedup", "alltoall", "gram", "auto")
_ALL_EXPERTS = ("model.moe.top_k=8",)
"""Every token visits every expert: no last digit sends one elsewhere."""
_ALONE = ("topology.ranks=1", "dp=megatron_ddp")
_STRATEGY_RUNS = {
    "local": ("dp=megatron_ddp",),
    **{name: ("dp=hp_fsdp", f"optimizer.strategy={name}") for name in STRATEGIES},
}
"""``local``: every rank holds whole matrices, under Megatron's wrapper. The other strategies: 4 shards."""


@dataclass(frozen=True)
class Study:
    """Runs that should agree.

    Attributes:
        steps: Of each run.
        common: Overrides of all runs.
        runs: Overrides by the name of a run. The first one is what the others are compared with.
    """

    steps: int
    common: tuple[str, ...]
    runs: dict[str, tuple[str, ...]]


STUDIES: dict[str, Study] = {
    "bf16": Study(1000, (*_BF16, *_EXACT, *_SMALL), _THREE),
    "bf16_4_ranks": Study(1000, _BF16, _THREE | _CONTROL),
    "dense_hp_muon": Study(100, (*_FP32, *_DENSE), WRAPPERS | _TORCH),
    "dense_adamw": Study(100, (*_FP32, *_DENSE, "optimizer=adamw"), WRAPPERS | _TORCH | _MEGATRON | _CONTROL),
    "moe_adamw": Study(100, (*_FP32, *_EXACT), WRAPPERS),
    "moe_4_ranks": Study(100, _FP32, WRAPPERS | _TORCH | _CONTROL),
    "strategies": Study(
        300,
        (*_FP32, *_DENSE, "run.global_batch_size=8"),
        {"one_process": (*_ALONE, "run.micro_batch_size=8"), **_STRATEGY_RUNS},
    ),
    "strategies_moe": Study(
        300, (*_FP32, "run.global_batch_size=8"), {"one_process": _ALONE, **_STRATEGY_RUNS, **_CONTROL}
    ),
    "strategies_all_experts": Study(
        300, (*_FP32, *_ALL_EXPERTS, "run.global_batch_size=8"), {"one_process": _ALONE, **_STRATEGY_RUNS}
    ),
}


def kept_log_path(study: str, run: str) -> Path:
    """Where the raw log of a run is kept."""
    return LOGS / study / f"{run}.jsonl"


def losses(path: Path) -> list[float]:
    """Training losses (nats per byte) of a ``metrics.jsonl``, in the order of its steps."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if LOSS in entry:
            found[entry["step"]] = float(entry[LOSS])
    return [found[step] for step in sorted(found)]


def kept_losses(study: str) -> dict[str, list[float]]:
    """Losses of the kept runs of a study, by name; those that were kept only."""
    paths = {run: kept_log_path(study, run) for run in STUDIES[study].runs}
    return {run: losses(path) for run, path in paths.items() if path.is_file()}


@dataclass(frozen=True)
class Agreement:
    """How near two loss curves are.

    Attributes:
        r: Pearson's correlation.
        largest: Largest difference in nats per byte.
        relative: Largest difference relative to the loss.
    """

    r: float
    largest: float
    relative: float


def agreement(reference: list[float], other: list[float]) -> Agreement:
    """Compare the losses of two runs of equal length."""
    pairs = list(zip(reference, other, strict=True))
    mean_x, mean_y = math.fsum(reference) / len(pairs), math.fsum(other) / len(pairs)
    covariance = math.fsum((x - mean_x) * (y - mean_y) for x, y in pairs)
    variances = math.fsum((x - mean_x) ** 2 for x in reference) * math.fsum((y - mean_y) ** 2 for y in other)
    differences = [abs(x - y) for x, y in pairs]
    relative = max(abs(x - y) / abs(x) for x, y in pairs)
    return Agreement(covariance / math.sqrt(variances), max(differences), relative)


def row(study: str, run: str, near: Agreement) -> str:
    """A line of the README's table."""
    return f"| {study} | {run} | {1 - near.r:.1e} | {near.largest:.1e} | {near.relative:.1e} |"


def rows(study: str, found: dict[str, list[float]]) -> list[str]:
    """How near each run is to the first one of its study."""
    first, *others = found
    return [row(study, run, agreement(found[first], found[run])) for run in others]
