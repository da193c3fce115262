"""From Megatron's optimizer configuration and wrapped model chunks to the plugin's optimizer."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.layout.cuts import Cuts
from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.megatron.groups import MegatronGroups, megatron_groups
from hp_muon_plugin.megatron.main_params import ParamPair, main_param
from hp_muon_plugin.megatron.norms import CountedParam, counts_here
from hp_muon_plugin.megatron.optimizer import HpMuonMegatronOptimizer
from hp_muon_plugin.megatron.options import Given, resolve_options
from hp_muon_plugin.megatron.param_groups import divide_groups, upstream_groups
from hp_muon_plugin.megatron.refusals import refuse_arguments, refuse_split_latent, refuse_unreduced, refuse_wrappers
from hp_muon_plugin.megatron.sharded_build import adamw_only, all_adamw, build_sharded_optimizer
from hp_muon_plugin.megatron.sharded_model import HpFsdpModel
from hp_muon_plugin.megatron.specs import chunk_specs
from hp_muon_plugin.muon.distributed.items import ShardedParam
from hp_muon_plugin.muon.distributed.optimizer import ShardedMuonOptimizer
from hp_muon_plugin.muon.distributed.share import Share
from hp_muon_plugin.muon.routing import Algorithm, Route, route_parameters
from hp_muon_plugin.muon.table import format_table, table_rows
from hp_muon_plugin.platform.collectives import gathered_objects

logger = logging.getLogger(__name__)


def build_megatron_optimizer(
    config: Any,
    chunks: Sequence[torch.nn.Module],
    *,
    settings: Given = None,
    arguments: Mapping[str, Any] | None = None,
) -> HpMuonMegatronOptimizer:
    """Build the optimizer that Megatron's factory returns for ``hp_muon``.

    Every rank calls it, with its own model chunks.

    Args:
        config: megatron-core's ``OptimizerConfig``.
        chunks: Model chunks inside Megatron's DistributedDataParallel.
        settings: Options; what a mapping does not name, and everything with None, comes from ``config``.
        arguments: What else the factory was called with, by name.

    Returns:
        The optimizer. Rank 0 logs the routing table.

    Raises:
        ConfigError: If Megatron's configuration asks for what cannot work.
        ConfigErrors: If it asks for several such things.
    """
    arguments = arguments or {}
    refuse_arguments(arguments)
    refuse_wrappers(chunks)
    options = resolve_options(settings, config)
    sharded = [chunk for chunk in chunks if isinstance(chunk, HpFsdpModel)]
    if sharded:
        return build_sharded_optimizer(config, sharded, options, partial(muon_routes, options), arguments=arguments)
    refuse_split_latent(chunks)
    groups = megatron_groups(arguments.get("pg_collection"))
    specs = chunk_specs(chunks, options, groups)
    refuse_unreduced(specs)
    routes = muon_routes(options, specs)
    upstream = upstream_groups(config, chunks, arguments)
    divided = divide_groups(upstream, dict(zip(specs, routes, strict=True)), options, config)
    optimizer = _assemble(divided, specs, routes, options, config, groups)
    optimizer.clip_logits(chunks)
    optimizer.watch(chunks)
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.info("parameters of rank 0 and who updates them:\n%s", format_table(table_rows(routes, options)))
    return optimizer


def _assemble(
    divided: list[dict[str, Any]],
    specs: Mapping[torch.nn.Parameter, ParamSpec],
    routes: Sequence[Route],
    settings: HpMuon,
    config: Any,
    groups: MegatronGroups,
) -> HpMuonMegatronOptimizer:
    algorithms = {param: route.algorithm for param, route in zip(specs, routes, strict=True)}
    pairs, counted = [], []
    for group in divided:
        mains = []
        for model in group["params"]:
            main = main_param(model)
            mains.append(main)
            pairs.append(ParamPair(model, main))
            counts = counts_here(model, specs[model], groups)
            counted.append(CountedParam(specs[model], main, algorithms[model], counts))
        group["params"] = mains
    main_specs = {param.main: param.spec for param in counted}
    main_specs |= {param: spec for param, spec in specs.items() if not spec.trainable}
    shares = [
        Share(
            axis,
            tuple(ShardedParam(param.spec, Cuts.of((0, param.spec.local_numel))) for param in held),
            tuple(param.main for param in held),
            is_replicated=True,
        )
        for axis, is_expert in ((groups.dp, False), (groups.expert_dp, True))
        if axis.size > 1
        and (held := [p for p in counted if p.algorithm is Algorithm.muon and p.spec.is_expert is is_expert])
    ]
    device = next((param.main.device for param in counted), torch.device("cpu"))
    inner = ShardedMuonOptimizer(divided, main_specs, settings, axes=groups.axes, shares=shares, device=device)
    return HpMuonMegatronOptimizer(inner, config, pairs, counted, groups)


def build_sharded_adamw(
    config: Any, chunks: Sequence[HpFsdpModel], options: AdamW, *, arguments: Mapping[str, Any] | None = None
) -> HpMuonMegatronOptimizer:
    """Build AdamW over the shards of HP-FSDP. Every rank calls it, with its own chunks.

    Args:
        config: megatron-core's ``OptimizerConfig``.
        chunks: Wrapped chunks.
        options: Options.
        arguments: What else Megatron's factory takes, by name.

    Returns:
        The optimizer.
    """
    return build_sharded_optimizer(config, chunks, adamw_only(options), all_adamw, arguments=arguments)


def muon_routes(settings: HpMuon, specs: Mapping[torch.nn.Parameter, ParamSpec]) -> tuple[Route, ...]:
    """Routes of a model by the role of its parameters. Collective.

    Args:
        settings: Options.
        specs: Parameters of this rank.

    Returns:
        A route for each.

    Raises:
        ConfigError: If no rank has a matrix for Muon.
    """
    routes = _routes(specs, settings)
    _require_muon(routes)
    return routes


def _routes(specs: Mapping[torch.nn.Parameter, ParamSpec], settings: HpMuon) -> tuple[Route, ...]:
    names: list[str] | None = None
    if (settings.muon_params or settings.adamw_params) and dist.is_initialized():
        gathered = gathered_objects([spec.name for spec in specs.values()], "names of parameters")
        names = sorted({name for rank_names in gathered for name in rank_names})
    return route_parameters(
        list(specs.values()),
        muon_params=settings.muon_params,
        adamw_params=settings.adamw_params,
        all_names=names,
    )


def _require_muon(routes: Sequence[Route]) -> None:
    """Some rank must have a matrix; one pipeline stage alone may have none."""
    count = sum(route.algorithm is Algorithm.muon for route in routes)
    if dist.is_initialized():
        count = sum(gathered_objects(count, "numbers of matrices"))
    if count == 0:
        raise ConfigError(
            "optimizer", "hp_muon", "no parameter of the model is a matrix that Muon takes", "take optimizer=adamw"
        )
