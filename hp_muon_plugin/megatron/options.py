"""Megatron's OptimizerConfig as our options: what is taken from it, and what is refused.

An option of ours that was given wins. What was not given comes from Megatron's configuration, and an
option of Megatron's that can be neither taken nor honoured is refused, never ignored in silence.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hp_muon_plugin.config.checks import check_optimizer
from hp_muon_plugin.config.choices import ScaleMode, Schedule, TensorParallelMode
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.options import from_options, overlay
from hp_muon_plugin.errors import ConfigError, raise_all

logger = logging.getLogger(__name__)

Given = HpMuon | Mapping[str, Any] | None
"""What the user gave: every option, some of them by name, or none."""


@dataclass(frozen=True, slots=True)
class Counterpart:
    """An option of Megatron's own Muon that one of ours stands for.

    Megatron's value counts where it differs from Megatron's default, because a value that was set
    cannot be told from one that was not; otherwise ours keeps its own default.

    Attributes:
        theirs: Name in OptimizerConfig.
        ours: Name in HpMuon.
        values: Our value for each of theirs; None where they are the same.
    """

    theirs: str
    ours: str
    values: Mapping[str, Any] | None = None


_SCALES = {
    "spectral": ScaleMode.spectral,
    "unit_rms_norm": ScaleMode.unit_rms,
    "shape_scaling": ScaleMode.shape_scaling,
}
# Names of Emerging-Optimizers 0.3; 'aol' begins with another normalisation and has no counterpart.
_SCHEDULES = {
    "simple": Schedule.keller,
    "quintic": Schedule.you,
    "polar_express": Schedule.polar_express,
    "cans": Schedule.cans,
    "deepseekv4": Schedule.deepseek_v4,
}
_TP_MODES = ("duplicated", "distributed")  # blockwise is the default of OptimizerConfig, so that it never counts
COUNTERPARTS: tuple[Counterpart, ...] = (
    Counterpart("muon_momentum", "momentum"),
    Counterpart("muon_use_nesterov", "nesterov"),  # 0.16 and 0.17
    Counterpart("muon_nesterov", "nesterov"),
    Counterpart("muon_split_qkv", "split_qkv"),
    Counterpart("muon_scale_mode", "scale", _SCALES),
    Counterpart("muon_extra_scale_factor", "scale_factor"),
    Counterpart("muon_coefficient_type", "schedule", _SCHEDULES),
    Counterpart("muon_num_ns_steps", "steps"),
    Counterpart("muon_tp_mode", "tp_mode", {mode: TensorParallelMode(mode) for mode in _TP_MODES}),
)

# Refused where they differ from Megatron's default: name, why, fix.
_NO_FP16 = "fp16 is refused, and nothing else is scaled"
_FLAT = "shards by element, not by matrix"
_SHARDS = "leave {} out; sharded data parallelism of ours is dp=hp_fsdp, or install(data_parallel={{}})"
_OTHER = "belongs to another optimizer"
REFUSED: dict[str, tuple[str, str]] = {
    "fp16": ("needs dynamic loss scaling, which the plugin's optimizers do not have", "train in bf16 or fp32"),
    "loss_scale": (_NO_FP16, "leave it out"),
    "use_distributed_optimizer": (
        "its flat shards cut matrices",
        _SHARDS.format("--use-distributed-optimizer"),
    ),
    "use_layer_wise_distributed_optimizer": (_FLAT, _SHARDS.format("it")),
    "overlap_param_gather": ("belongs to the distributed optimizer", "leave it out"),
    "overlap_param_gather_with_optimizer_step": ("belongs to the distributed optimizer", "leave it out"),
    "reuse_grad_buf_for_mxfp8_param_ag": ("belongs to the distributed optimizer", "leave it out"),
    "optimizer_cpu_offload": ("Newton-Schulz runs on the device", "leave it out"),
    "optimizer_cuda_graph": ("whether a step is taken is decided by the host", "leave it out"),
    "use_precision_aware_optimizer": (
        "belongs to Transformer Engine's Adam",
        "use optimizer.momentum_dtype instead",
    ),
    "decoupled_weight_decay": ("hp_muon's weight decay is decoupled", "leave it True, or set weight_decay=0"),
    "muon_fp32_matmul_prec": ("hp_muon chooses the type by a table", "install({'ns_dtype': 'float32'}) or another"),
    "muon_scalar_optimizer": ("AdamW updates what Muon does not", "leave it out"),
    "sgd_momentum": (_OTHER, "leave it out"),
    "lion_beta1": (_OTHER, "leave it out"),
    "lion_beta2": (_OTHER, "leave it out"),
    "soap_shampoo_beta": (_OTHER, "leave it out"),
    "soap_precondition_frequency": (_OTHER, "leave it out"),
    "soap_use_kl_shampoo": (_OTHER, "leave it out"),
    "adaptive_muon_moment2_method": (_OTHER, "leave it out"),
    "adaptive_muon_beta2": (_OTHER, "leave it out"),
    "adaptive_muon_eps": (_OTHER, "leave it out"),
}

HONOURED = frozenset(
    {
        "optimizer", "lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "weight_decay", "apply_wd_to_qk_layernorm",
        "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "grad_norm_skip_threshold", "log_num_zeros_in_grad",
        "bf16", "params_dtype",
    }
)  # fmt: skip
"""Options that hold as they stand."""

WITHOUT_EFFECT = frozenset(
    {
        # details of what is refused above
        "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis", "store_param_remainders",
        "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "optimizer_offload_fraction",
        "use_torch_optimizer_for_cpu_offload", "overlap_cpu_optimizer_d2h_h2d", "pin_cpu_grads", "pin_cpu_params",
        # of the model or of reports, and nothing that an update depends on
        "fp8_recipe", "timers", "barrier_with_L1_time", "config_logger_dir",
    }
)  # fmt: skip
"""Options that no update depends on."""


def resolve_options(given: Given, config: Any) -> HpMuon:
    """All options of a run: what was given, and the rest from Megatron.

    Args:
        given: ``HpMuon`` says everything; a mapping only what it names; None nothing.
        config: megatron-core's ``OptimizerConfig``.

    Returns:
        Checked options.

    Raises:
        ConfigError: If Megatron's configuration asks for what cannot work, or an option is wrong.
        ConfigErrors: If several things are wrong.
    """
    defaults = {field.name: field.default for field in fields(config)}
    changed = {name: getattr(config, name) for name in defaults if getattr(config, name) != defaults[name]}
    raise_all([ConfigError(name, changed[name], *why) for name, why in REFUSED.items() if name in changed])
    _warn_unknown(set(changed))
    if isinstance(given, HpMuon):
        check_optimizer(given)
        return given
    named = given or {}
    base = _from_megatron(config, changed, set(named))
    settings = from_options(HpMuon, overlay(base, named), prefix="optimizer")
    check_optimizer(settings)
    return settings


def _from_megatron(config: Any, changed: Mapping[str, Any], named: set[str]) -> dict[str, Any]:
    """Options that Megatron's configuration sets, by our names.

    Muon and AdamW share the learning rate, which our default scale is made for.
    """
    values: dict[str, Any] = {
        "weight_decay": config.weight_decay,
        "clip_grad": config.clip_grad,
        "adamw": {"betas": [config.adam_beta1, config.adam_beta2], "eps": config.adam_eps},
    }
    if "lr" not in named:
        if config.lr is None:
            raise ConfigError(
                "lr", None, "Megatron's OptimizerConfig has no learning rate", "set lr=..., or install({'lr': ...})"
            )
        values["lr"] = config.lr
    for pair in COUNTERPARTS:
        if pair.theirs in changed and pair.ours not in named:
            values[pair.ours] = _our_value(pair, changed[pair.theirs])
    return values


def _our_value(pair: Counterpart, value: Any) -> Any:
    if pair.values is None:
        return value
    if value not in pair.values:
        raise ConfigError(
            pair.theirs,
            value,
            f"has no counterpart in hp_muon, which knows {', '.join(pair.values)}",
            f"choose one of these, or give our own option: install({{'{pair.ours}': ...}})",
        )
    return pair.values[value]


def _warn_unknown(changed: set[str]) -> None:
    theirs = {pair.theirs for pair in COUNTERPARTS}
    unknown = sorted(changed - theirs - REFUSED.keys() - HONOURED - WITHOUT_EFFECT)
    if unknown:
        logger.warning("hp_muon does not know these options of OptimizerConfig and ignores them: %s", unknown)
