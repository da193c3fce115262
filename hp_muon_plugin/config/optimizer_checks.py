"""What the options of an optimizer must be together."""

from collections.abc import Iterator

from hp_muon_plugin.config.choices import ClipMode, FloatDtype, ScaleMode, Schedule, TensorParallelMode
from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.errors import ConfigError


def optimizer_errors(config: HpMuon | AdamW) -> Iterator[ConfigError]:
    """Check options that depend on each other.

    Args:
        config: Options of ``hp_muon`` or ``adamw``.

    Yields:
        One error for each thing that is wrong.
    """
    if isinstance(config, AdamW):
        yield from _betas_errors("optimizer.betas", config.betas)
    elif isinstance(config, HpMuon):
        yield from _betas_errors("optimizer.adamw.betas", config.adamw.betas)
        yield from _adamw_lr_errors(config)
        yield from _schedule_errors(config)
        yield from _tp_mode_errors(config)
        yield from _overlap_errors(config)
        for option in ("comm_dtype", "momentum_dtype"):
            if getattr(config, option) is FloatDtype.float16:
                yield ConfigError(
                    f"optimizer.{option}",
                    "float16",
                    "momenta below 6e-8 vanish in it and those above 65504 become infinite",
                    f"set optimizer.{option}=bfloat16",
                )
    else:
        given = type(config).__name__
        yield ConfigError("optimizer", given, "is not an optimizer of ours", "optimizer=hp_muon or optimizer=adamw")


def _betas_errors(option: str, betas: list[float]) -> Iterator[ConfigError]:
    if len(betas) != 2:
        yield ConfigError(option, betas, "needs two numbers", f"e.g. {option}=[0.9,0.95]")


def _adamw_lr_errors(config: HpMuon) -> Iterator[ConfigError]:
    option = "optimizer.adamw.lr"
    if config.adamw.lr is None and config.scale is not ScaleMode.match_rms_adamw:
        yield ConfigError(
            option,
            "null",
            f"AdamW cannot share optimizer.lr with optimizer.scale={config.scale}, whose updates have another size",
            f"set {option}, e.g. {option}=3e-3, or take optimizer.scale=match_rms_adamw",
        )


def _schedule_errors(config: HpMuon) -> Iterator[ConfigError]:
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


def _tp_mode_errors(config: HpMuon) -> Iterator[ConfigError]:
    if config.tp_mode is TensorParallelMode.distributed and config.ns_dtype not in (None, FloatDtype.float32):
        yield ConfigError(
            "optimizer.ns_dtype",
            config.ns_dtype,
            "optimizer.tp_mode=distributed sums and iterates float32 Gram matrices",
            "leave optimizer.ns_dtype out, or take optimizer.tp_mode=owner",
        )


def _overlap_errors(config: HpMuon) -> Iterator[ConfigError]:
    if config.overlap_backward and config.clip_grad > 0 and config.clip_mode is ClipMode.all:
        yield ConfigError(
            "optimizer.overlap_backward",
            "true",
            f"sends what is made of gradients before their norm is known, and optimizer.clip_grad={config.clip_grad:g} "
            "scales them by it",
            "set optimizer.clip_mode=adamw_only, which leaves Muon's gradients as they are, or optimizer.clip_grad=0",
        )
