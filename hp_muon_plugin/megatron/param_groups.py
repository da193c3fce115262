"""Parameter groups: Megatron's own, each divided into its Muon and its AdamW part.

Megatron's factory decides weight decay, learning-rate multipliers and overrides per parameter; that
code is called, not repeated, so whatever a trainer passes (``no_weight_decay_cond``,
``scale_lr_cond``, ``config_overrides``, ``decoupled_lr``) holds here too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core import optimizer as factory

from hp_muon_plugin.config.optimizer import HpMuon, ScalarAdamW
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.megatron.versions import core_version
from hp_muon_plugin.muon.routing import Algorithm, Route
from hp_muon_plugin.muon.scalar import adamw_defaults


def settings_from(config: Any) -> HpMuon:
    """Options for a trainer that gave none: everything that Megatron's own configuration says.

    Args:
        config: megatron-core's ``OptimizerConfig``.

    Returns:
        Options; Muon and AdamW share the learning rate, which the default scale is made for.
    """
    return HpMuon(
        lr=config.lr,
        weight_decay=config.weight_decay,
        clip_grad=config.clip_grad,
        adamw=ScalarAdamW(betas=[config.adam_beta1, config.adam_beta2], eps=config.adam_eps),
    )


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
    global value times ``wd_mult``; so the plugin's values go into these three. A ``max_lr`` that an
    override set is kept.

    Args:
        upstream: From :func:`upstream_groups`.
        routes: Route of every parameter.
        settings: Options.
        config: megatron-core's ``OptimizerConfig``.

    Returns:
        Two groups for each of upstream's, also where one is empty, so that all ranks have the same.

    Raises:
        ConfigError: If Megatron's weight decay is 0 and the plugin's is not.
    """
    divided = []
    scalar = adamw_defaults(settings)
    peaks = {Algorithm.muon: settings.lr, Algorithm.adamw: scalar["lr"]}
    decays = {Algorithm.muon: settings.weight_decay, Algorithm.adamw: scalar["weight_decay"]}
    for group in upstream:
        for algorithm in (Algorithm.muon, Algorithm.adamw):
            part = dict(group, algorithm=str(algorithm))
            part["params"] = [p for p in group["params"] if routes[p].algorithm is algorithm]
            if group.get("max_lr") in (None, config.lr):
                part["max_lr"] = peaks[algorithm]
                part["min_lr"] = peaks[algorithm] * ((config.min_lr or 0.0) / config.lr if config.lr else 0.0)
            part["wd_mult"] = group.get("wd_mult", 1.0) * _decay_ratio(decays[algorithm], config)
            part["lr"] = part["max_lr"] * (part.get("lr_mult") or 1.0)
            part["weight_decay"] = config.weight_decay * part["wd_mult"]
            divided.append(part)
    return divided


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
