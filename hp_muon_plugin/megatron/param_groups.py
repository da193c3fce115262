"""Parameter groups: Megatron's own, each divided into its Muon and its AdamW part.

Megatron's factory decides weight decay, learning-rate multipliers and overrides per parameter; that
code is called, not repeated, so whatever a trainer passes (``no_weight_decay_cond``,
``scale_lr_cond``, ``config_overrides``, ``decoupled_lr``) holds here too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core import optimizer as factory

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.megatron.versions import core_version
from hp_muon_plugin.muon.routing import Algorithm, Route
from hp_muon_plugin.muon.scalar import adamw_defaults


def upstream_groups(
    config: Any, chunks: Sequence[torch.nn.Module], arguments: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The groups that Megatron's factory would make.

    From 0.16 on this is a collective call over all ranks.

    Args:
        config: megatron-core's ``OptimizerConfig``.
        chunks: Model chunks inside their data-parallel wrapper.
        arguments: What else the factory was called with, by name.

    Returns:
        Groups with upstream's keys (``wd_mult``, ``lr_mult``, ``max_lr``, ...).
    """
    if core_version().lane < (0, 16):
        groups: list[dict[str, Any]] = factory._get_param_groups(
            list(chunks),
            arguments.get("no_weight_decay_cond"),
            arguments.get("scale_lr_cond"),
            arguments.get("lr_mult", 1.0),
            lr=config.lr,
            min_lr=config.min_lr,
            decoupled_lr=config.decoupled_lr,
            decoupled_min_lr=config.decoupled_min_lr,
        )
        return groups
    overrides = arguments.get("config_overrides")
    if overrides is None:
        overrides = standard_overrides(config)["config_overrides"]
    groups = factory._get_param_groups(list(chunks), config, overrides)
    return groups


def standard_overrides(config: Any) -> dict[str, Any]:
    """The factory argument that keeps norms and biases free of weight decay.

    Up to 0.16 that is the factory's own default; newer factories decay everything that the caller
    does not exempt, and megatron.training passes these overrides.

    Args:
        config: megatron-core's ``OptimizerConfig``.

    Returns:
        Keyword arguments for ``get_megatron_optimizer``; empty for versions without overrides.
    """
    if core_version().lane < (0, 16):
        return {}
    return {"config_overrides": factory.get_standard_config_overrides(config)}


def divide_groups(
    upstream: Sequence[dict[str, Any]],
    routes: Mapping[torch.nn.Parameter, Route],
    settings: HpMuon,
    config: Any,
) -> list[dict[str, Any]]:
    """Divide every group by algorithm and give each part its own learning rate and decay.

    Schedulers write ``lr`` from ``max_lr`` and ``min_lr``, and ``weight_decay`` from their own
    global value times ``wd_mult``; so the plugin's values go into these three. What an override of
    the trainer's set (``max_lr``, ``min_lr``, ``start_wd``, ``end_wd``) is kept as it stands.

    Args:
        upstream: From :func:`upstream_groups`.
        routes: Route of every parameter.
        settings: Options.
        config: megatron-core's ``OptimizerConfig``.

    Returns:
        Two groups for each of upstream's, also where one is empty, so that all ranks have the same.

    Raises:
        ConfigError: If Megatron's weight decay is 0 and the plugin's is not, or an override chooses an optimizer.
    """
    divided = []
    scalar = adamw_defaults(settings)
    peaks = {Algorithm.muon: settings.lr, Algorithm.adamw: scalar["lr"]}
    decays = {Algorithm.muon: settings.weight_decay, Algorithm.adamw: scalar["weight_decay"]}
    for group in upstream:
        _refuse_optimizer(group)
        for algorithm in (Algorithm.muon, Algorithm.adamw):
            part = dict(group, algorithm=str(algorithm))
            part["params"] = [p for p in group["params"] if routes[p].algorithm is algorithm]
            part |= _rates(group, peaks[algorithm], config)
            part |= _decay(group, decays[algorithm], config)
            divided.append(part)
    return divided


def _rates(group: Mapping[str, Any], peak: float, config: Any) -> dict[str, float]:
    rates: dict[str, Any] = {"max_lr": group.get("max_lr"), "min_lr": group.get("min_lr")}
    if rates["max_lr"] in (None, config.lr) and not group.get("is_decoupled_lr"):
        rates["max_lr"] = peak
        is_theirs = peak == config.lr and rates["min_lr"] is not None  # to the bit: Megatron finds groups by it
        if rates["min_lr"] in (None, config.min_lr) and not is_theirs:
            rates["min_lr"] = peak * ((config.min_lr or 0.0) / config.lr if config.lr else 0.0)
    return {**rates, "lr": rates["max_lr"] * (group.get("lr_mult") or 1.0)}


def _decay(group: Mapping[str, Any], decay: float, config: Any) -> dict[str, float]:
    factor = group.get("wd_mult", 1.0)
    if "start_wd" in group or "end_wd" in group:  # absolute: the scheduler takes them instead of its own
        return {"wd_mult": factor, "weight_decay": factor * group.get("start_wd", group.get("end_wd"))}
    factor *= _decay_ratio(decay, config)
    return {"wd_mult": factor, "weight_decay": factor * config.weight_decay}


def _refuse_optimizer(group: Mapping[str, Any]) -> None:
    if group.get("optimizer"):
        raise ConfigError(
            "config_overrides.optimizer",
            group["optimizer"],
            "hp_muon routes parameters by their role, not by this override",
            "name them in optimizer.adamw_params or optimizer.muon_params, e.g. "
            "install({'adamw_params': ['*.linear_proj.weight']})",
        )


def _decay_ratio(decay: float, config: Any) -> float:
    if decay == config.weight_decay:
        return 1.0
    if not config.weight_decay:
        raise ConfigError(
            "optimizer.weight_decay",
            decay,
            "Megatron's schedulers multiply their own weight decay, which is 0 here",
            f"give Megatron weight_decay={decay} as well (--weight-decay {decay}), or set optimizer.weight_decay=0",
        )
    return float(decay / config.weight_decay)
