"""Cross-field checks: everything that a user can get wrong and that needs no device to see.

All findings are collected, so that a user repairs a configuration once. No torch here: the checks
run before any process group exists.
"""

from collections.abc import Iterator
from pathlib import Path

from hp_muon_plugin.config.choices import DataKind, Precision, ScaleMode, Schedule
from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.config.trainer import Data, Model, Topology, Train
from hp_muon_plugin.errors import ConfigError, raise_all


def check_train(config: Train, *, world_size: int) -> None:
    """Check a training configuration against the number of ranks.

    Args:
        config: The typed configuration.
        world_size: Ranks of the job.

    Raises:
        ConfigError: If one thing is wrong.
        ConfigErrors: If several are.
    """
    errors = [
        *_check_optimizer(config.optimizer),
        *_check_topology(config.topology, world_size),
        *_check_model(config.model, config.topology),
        *_check_batch(config, world_size),
        *_check_data(config.data),
        *_check_precision(config),
    ]
    raise_all(errors)


def check_optimizer(config: HpMuon | AdamW) -> None:
    """Check the options of an optimizer alone.

    Args:
        config: Options of ``hp_muon`` or ``adamw``.

    Raises:
        ConfigError: If one option is wrong.
        ConfigErrors: If several are.
    """
    raise_all(list(_check_optimizer(config)))


def data_parallel_size(topology: Topology, world_size: int) -> int:
    """Ranks that see different data.

    Args:
        topology: Parallel sizes; must divide ``world_size``.
        world_size: Ranks of the job.

    Returns:
        ``world_size / (tp * pp)``.
    """
    return world_size // (topology.tp * topology.pp)


def _positive(option: str, value: float) -> Iterator[ConfigError]:
    if not value > 0:
        yield ConfigError(option, value, "must be greater than 0", f"e.g. {option}=1")


def _fraction(option: str, value: float) -> Iterator[ConfigError]:
    if not 0 <= value < 1:
        yield ConfigError(option, value, "must be at least 0 and less than 1", f"e.g. {option}=0.95")


def _not_negative(option: str, value: float) -> Iterator[ConfigError]:
    if not value >= 0:
        yield ConfigError(option, value, "must not be negative", f"e.g. {option}=0")


def _check_optimizer(config: HpMuon | AdamW) -> Iterator[ConfigError]:
    if not isinstance(config, HpMuon | AdamW):
        given = type(config).__name__
        yield ConfigError("optimizer", given, "is not an optimizer of ours", "optimizer=hp_muon or optimizer=adamw")
        return
    yield from _positive("optimizer.lr", config.lr)
    yield from _not_negative("optimizer.weight_decay", config.weight_decay)
    yield from _not_negative("optimizer.clip_grad", config.clip_grad)
    if isinstance(config, AdamW):
        yield from _check_betas("optimizer.betas", config.betas)
        yield from _positive("optimizer.eps", config.eps)
        return
    yield from _fraction("optimizer.momentum", config.momentum)
    yield from _positive("optimizer.scale_factor", config.scale_factor)
    yield from _check_betas("optimizer.adamw.betas", config.adamw.betas)
    yield from _positive("optimizer.adamw.eps", config.adamw.eps)
    yield from _check_adamw_lr(config)
    yield from _check_schedule(config)


def _check_betas(option: str, betas: list[float]) -> Iterator[ConfigError]:
    if len(betas) != 2:
        yield ConfigError(option, betas, "needs two numbers", f"e.g. {option}=[0.9,0.95]")
        return
    for beta in betas:
        yield from _fraction(option, beta)


def _check_adamw_lr(config: HpMuon) -> Iterator[ConfigError]:
    option = "optimizer.adamw.lr"
    if config.adamw.lr is not None:
        yield from _positive(option, config.adamw.lr)
    elif config.scale is not ScaleMode.match_rms_adamw:
        yield ConfigError(
            option,
            "null",
            f"AdamW cannot share optimizer.lr with optimizer.scale={config.scale}, whose updates have another size",
            f"set {option}, e.g. {option}=3e-3, or take optimizer.scale=match_rms_adamw",
        )
    if config.adamw.weight_decay is not None:
        yield from _not_negative("optimizer.adamw.weight_decay", config.adamw.weight_decay)


def _check_schedule(config: HpMuon) -> Iterator[ConfigError]:
    is_custom = config.schedule is Schedule.custom
    if is_custom and not config.coefficients:
        yield ConfigError(
            "optimizer.coefficients",
            "null",
            "optimizer.schedule=custom needs one row [a,b,c] for each step",
            "e.g. optimizer.coefficients=[[3.4445,-4.775,2.0315]]",
        )
    if not is_custom and config.coefficients:
        yield ConfigError(
            "optimizer.coefficients",
            config.coefficients,
            f"would be ignored with optimizer.schedule={config.schedule}",
            "set optimizer.schedule=custom, or leave the coefficients out",
        )
    for row in config.coefficients or []:
        if len(row) != 3:
            yield ConfigError("optimizer.coefficients", row, "a row has three numbers", "write [a,b,c]")
    if config.steps is not None:
        yield from _positive("optimizer.steps", config.steps)


def _check_topology(topology: Topology, world_size: int) -> Iterator[ConfigError]:
    sizes = {name: getattr(topology, name) for name in ("tp", "pp", "ep", "etp")}
    for name, size in sizes.items():
        yield from _positive(f"topology.{name}", size)
    yield from _positive("topology.threads", topology.threads)
    yield from _positive("topology.timeout_s", topology.timeout_s)
    if min(sizes.values()) < 1:
        return
    yield from _check_divides(topology, world_size)
    if topology.sequence_parallel and topology.tp == 1:
        yield ConfigError(
            "topology.sequence_parallel",
            True,
            "splits activations over tensor-parallel ranks, and topology.tp=1",
            "set topology.tp=2 or more, or topology.sequence_parallel=false",
        )


def _check_divides(topology: Topology, world_size: int) -> Iterator[ConfigError]:
    dense = topology.tp * topology.pp
    if world_size % dense:
        yield ConfigError(
            "topology.tp",
            topology.tp,
            f"{world_size} ranks cannot be split into groups of tp*pp = {topology.tp}*{topology.pp} = {dense}",
            f"choose tp*pp among the divisors of {world_size}: {_divisors(world_size)}",
        )
    expert = topology.ep * topology.etp * topology.pp
    if world_size % expert:
        yield ConfigError(
            "topology.ep",
            topology.ep,
            f"{world_size} ranks cannot be split into groups of ep*etp*pp = "
            f"{topology.ep}*{topology.etp}*{topology.pp} = {expert}",
            f"choose ep*etp*pp among the divisors of {world_size}: {_divisors(world_size)}",
        )


def _divisors(number: int) -> str:
    return ", ".join(str(i) for i in range(1, number + 1) if number % i == 0)


def _check_model(model: Model, topology: Topology) -> Iterator[ConfigError]:
    for name in ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "seq_length"):
        yield from _positive(f"model.{name}", getattr(model, name))
    if min(topology.tp, topology.pp, topology.ep, topology.etp, model.num_query_groups) < 1:
        return
    divisions = [
        ("model.num_layers", model.num_layers, "topology.pp", topology.pp),
        ("model.num_attention_heads", model.num_attention_heads, "topology.tp", topology.tp),
        (
            "model.num_attention_heads",
            model.num_attention_heads,
            "model.num_query_groups",
            model.num_query_groups,
        ),
        ("model.hidden_size", model.hidden_size, "model.num_attention_heads", model.num_attention_heads),
    ]
    if model.moe is None:
        divisions.append(("model.ffn_hidden_size", model.ffn_hidden_size, "topology.tp", topology.tp))
    else:
        divisions.append(("model.moe.num_experts", model.moe.num_experts, "topology.ep", topology.ep))
        divisions.append(("model.moe.ffn_hidden_size", model.moe.ffn_hidden_size, "topology.etp", topology.etp))
    if topology.sequence_parallel:
        divisions.append(("model.seq_length", model.seq_length, "topology.tp", topology.tp))
    for option, value, divisor_option, divisor in divisions:
        if divisor < 1 or value % divisor:
            yield ConfigError(
                option,
                value,
                f"is not divisible by {divisor_option}={divisor}",
                f"choose a multiple of {divisor} for {option}, or a divisor of {value} for {divisor_option}",
            )
    yield from _check_moe(model, topology)


def _check_moe(model: Model, topology: Topology) -> Iterator[ConfigError]:
    if model.moe is None:
        for name in ("ep", "etp"):
            if getattr(topology, name) > 1:
                yield ConfigError(
                    f"topology.{name}",
                    getattr(topology, name),
                    f"model={model.name} has no experts to spread",
                    f"set topology.{name}=1, or take model=tiny_moe",
                )
        return
    if not 1 <= model.moe.top_k <= model.moe.num_experts:
        yield ConfigError(
            "model.moe.top_k",
            model.moe.top_k,
            f"a token cannot visit {model.moe.top_k} of {model.moe.num_experts} experts",
            f"choose 1 to {model.moe.num_experts}",
        )
    if topology.tp > 1 and not topology.sequence_parallel:
        yield ConfigError(
            "topology.sequence_parallel",
            False,
            "megatron-core trains experts under tensor parallelism with sequence parallelism only",
            "set topology.sequence_parallel=true, or topology.tp=1",
        )


def _check_batch(config: Train, world_size: int) -> Iterator[ConfigError]:
    run = config.run
    for name in ("steps", "micro_batch_size", "global_batch_size", "log_interval", "eval_interval"):
        yield from _positive(f"run.{name}", getattr(run, name))
    yield from _not_negative("lr_schedule.warmup_steps", config.lr_schedule.warmup_steps)
    if not 0 <= config.lr_schedule.min_ratio <= 1:
        yield ConfigError("lr_schedule.min_ratio", config.lr_schedule.min_ratio, "is a share of the peak", "0 to 1")
    if config.lr_schedule.warmup_steps >= run.steps:
        yield ConfigError(
            "lr_schedule.warmup_steps",
            config.lr_schedule.warmup_steps,
            f"the run has only run.steps={run.steps} steps",
            f"choose less than {run.steps}",
        )
    dense = config.topology.tp * config.topology.pp
    if dense < 1 or world_size % dense or run.micro_batch_size < 1:
        return
    step = run.micro_batch_size * data_parallel_size(config.topology, world_size)
    if run.global_batch_size % step:
        yield ConfigError(
            "run.global_batch_size",
            run.global_batch_size,
            f"is not a multiple of micro_batch_size * data-parallel ranks = {run.micro_batch_size} * "
            f"{step // run.micro_batch_size} = {step}",
            f"e.g. run.global_batch_size={max(step, run.global_batch_size // step * step)}",
        )


def _check_data(data: Data) -> Iterator[ConfigError]:
    parts = data.split.split(",")
    try:
        shares = [float(part) for part in parts]
    except ValueError:
        shares = []
    if len(shares) != 3 or min(shares, default=-1) < 0 or sum(shares) <= 0 or shares[0] <= 0 or shares[1] <= 0:
        yield ConfigError(
            "data.split",
            data.split,
            "needs three shares for train, validation and test, the first two above 0",
            'e.g. data.split="90,10,0"',
        )
    if data.kind is not DataKind.megatron:
        return
    if not data.path:
        yield ConfigError("data.path", data.path, "data=megatron needs your dataset", "data.path=/prefix/of/your/data")
    else:
        yield from _check_files(data.path)
    if data.vocab_size is None:
        yield ConfigError("data.vocab_size", None, "is not known for your own dataset", "e.g. data.vocab_size=32000")


def _check_files(prefix: str) -> Iterator[ConfigError]:
    if prefix.endswith((".bin", ".idx")):
        yield ConfigError("data.path", prefix, "is a file, and a prefix is wanted", f"data.path={prefix[:-4]}")
        return
    missing = [f"{prefix}{ending}" for ending in (".bin", ".idx") if not Path(f"{prefix}{ending}").is_file()]
    if missing:
        yield ConfigError(
            "data.path",
            prefix,
            f"there is no file {' and no file '.join(missing)}",
            "give the prefix of a dataset that Megatron's tools/preprocess_data.py wrote, without .bin or .idx",
        )


def _check_precision(config: Train) -> Iterator[ConfigError]:
    if config.platform.precision is Precision.fp16:
        yield ConfigError(
            "platform.precision",
            "fp16",
            "needs dynamic loss scaling; Newton-Schulz is invariant to the scale but AdamW and clipping are not, "
            "and megatron-core refuses fp16 with its own Muon too",
            "set platform.precision=bf16 or platform.precision=fp32",
        )
