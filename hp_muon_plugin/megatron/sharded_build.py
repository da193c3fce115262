"""The optimizer over the shards of HP-FSDP: state for own ranges only, norms over all parts."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

from hp_muon_plugin.config.choices import MissingGrad, OuterMode
from hp_muon_plugin.config.optimizer import AdamW, HpMuon, ScalarAdamW
from hp_muon_plugin.errors import ConfigError, HpMuonError
from hp_muon_plugin.fsdp.bucket import Bucket
from hp_muon_plugin.fsdp.mesh import ShardMesh
from hp_muon_plugin.fsdp.parameter import Parameter
from hp_muon_plugin.fsdp.placed import cuts
from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.megatron.groups import MegatronGroups
from hp_muon_plugin.megatron.main_params import ParamPair, main_param
from hp_muon_plugin.megatron.norms import CountedParam, counts_here
from hp_muon_plugin.megatron.optimizer import HpMuonMegatronOptimizer
from hp_muon_plugin.megatron.optimizer_state import as_megatrons_adamw
from hp_muon_plugin.megatron.param_groups import divide_groups, upstream_groups
from hp_muon_plugin.megatron.refusals import refuse_late_gradients, refuse_unreduced
from hp_muon_plugin.megatron.sharded_checkpoint import of_owner
from hp_muon_plugin.megatron.sharded_model import HpFsdpModel
from hp_muon_plugin.megatron.specs import chunk_specs
from hp_muon_plugin.muon.distributed.ahead import Reductions
from hp_muon_plugin.muon.distributed.items import ShardedParam
from hp_muon_plugin.muon.distributed.optimizer import ShardedMuonOptimizer
from hp_muon_plugin.muon.distributed.share import Held, Share, divided_share
from hp_muon_plugin.muon.routing import Algorithm, Route
from hp_muon_plugin.muon.table import format_table, table_rows
from hp_muon_plugin.platform.collectives import AxisGroup

logger = logging.getLogger(__name__)

_Home = tuple[HpFsdpModel, Bucket, Parameter]
RouteAll = Callable[[Mapping[torch.nn.Parameter, ParamSpec]], Sequence[Route]]


class ShardedMegatronOptimizer(HpMuonMegatronOptimizer):
    """:class:`HpMuonMegatronOptimizer` over shards of :class:`HpFsdpModel`."""

    chunks: Sequence[HpFsdpModel] = ()
    is_adamw_only = False
    """Whether no rank has a matrix for Muon, by choice."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See :meth:`HpMuonMegatronOptimizer.zero_grad`."""
        self.optimizer.withdraw()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """See :meth:`HpMuonMegatronOptimizer.prepare_grads`."""
        try:
            return super().prepare_grads()
        except HpMuonError:
            self.optimizer.withdraw()
            raise

    def _clip(self, clip_grad: float) -> float:
        with self.optimizer.own_clipping():
            return super()._clip(clip_grad)

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Update own ranges, and let the next forward send what other replicas wait for.

        Returns:
            True.
        """
        super().step_with_ready_grads()
        for chunk in self.chunks:
            chunk.schedule.note_update()
        return True

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None, **kwargs: Any
    ) -> Any:
        """State for megatron-core's distributed checkpoints: the ranges that this rank updates.

        Args:
            model_sharded_state_dict: Of the same chunks, in any structure.
            is_loading: Whether it is to be loaded into.
            metadata: Ignored; accepted for newer versions.
            **kwargs: Ignored, likewise.

        Returns:
            A sharded state dict. Its tensors have the keys and global shapes of a model that is not sharded; AdamW's is
            one that Megatron's own AdamW goes on from.
        """
        entries = extract_sharded_tensors_and_factories(model_sharded_state_dict)[0]
        own = [entry for entry in nested_values(entries) if isinstance(entry, ShardedTensorFactory)]
        if any(chunk.has_owners for chunk in self.chunks):
            own = [of_owner(entry) for entry in own]
        state: dict[str, Any] = super().sharded_state_dict(own, is_loading, metadata, **kwargs)
        if self.is_adamw_only and not is_loading:
            return as_megatrons_adamw(state, has_masters=self.config.bf16)
        return state


def adamw_only(options: AdamW) -> HpMuon:
    """Options of a Muon optimizer that has no matrices.

    Args:
        options: AdamW's.

    Returns:
        The same for our optimizer.
    """
    scalar = ScalarAdamW(lr=options.lr, betas=list(options.betas), eps=options.eps, weight_decay=options.weight_decay)
    return HpMuon(lr=options.lr, weight_decay=options.weight_decay, clip_grad=options.clip_grad, adamw=scalar)


def all_adamw(specs: Mapping[torch.nn.Parameter, ParamSpec]) -> tuple[Route, ...]:
    """Routes of a model without Muon.

    Args:
        specs: Its parameters.

    Returns:
        AdamW for each.
    """
    return tuple(Route(spec, Algorithm.adamw, "the optimizer is AdamW") for spec in specs.values())


def build_sharded_optimizer(
    config: Any,
    chunks: Sequence[HpFsdpModel],
    options: HpMuon,
    route: RouteAll,
    *,
    arguments: Mapping[str, Any] | None = None,
) -> ShardedMegatronOptimizer:
    """Build the optimizer of a sharded model. Every rank calls it, with its own chunks.

    Args:
        config: megatron-core's ``OptimizerConfig``.
        chunks: Wrapped chunks.
        options: Options.
        route: Chooses the algorithm of every parameter, in the order of the specs.
        arguments: What else Megatron's factory was called with, by name.

    Returns:
        The optimizer. Rank 0 logs the routing table.

    Raises:
        ConfigError: If an option cannot hold for shards.
    """
    if options.missing_grad is MissingGrad.error:
        raise ConfigError(
            "optimizer.missing_grad", "error", "dp=hp_fsdp reduces a zero for a missing gradient", "set it to leave"
        )
    groups = sharded_groups(chunks)
    if options.overlap_backward:
        refuse_late_gradients(chunks, groups)
    built = _Builder()
    with _all_whole(chunks) as homes:
        specs = chunk_specs(chunks, options, groups)
        shards = {param: homes[param][2].sharded for param in specs}
        refuse_unreduced(
            {shards[p]: dataclasses.replace(spec, trainable=shards[p].requires_grad) for p, spec in specs.items()}
        )
        routes = route(specs)
        algorithms = {param: chosen.algorithm for param, chosen in zip(specs, routes, strict=True)}
        divided = divide_groups(
            upstream_groups(config, chunks, arguments or {}), dict(zip(specs, routes, strict=True)), options, config
        )
        counts = {param: counts_here(param, spec, groups) for param, spec in specs.items()}
    for group in divided:
        group["params"] = [
            main
            for param in group["params"]
            if (main := built.take(homes[param], specs[param], algorithms[param], counts[param])) is not None
        ]
    muon = {param: spec for param, spec in specs.items() if algorithms[param] is Algorithm.muon}
    frozen = {homes[param][2].sharded: spec for param, spec in specs.items() if not spec.trainable}
    inner = ShardedMuonOptimizer(
        divided,
        built.specs | frozen,
        options,
        axes=groups.axes,
        shares=built.shares(muon, chunks, options),
        device=chunks[0].schedule.device,
        reductions=Reductions(chunks[0].schedule.reducer.listen, lambda shard: getattr(shard, "main_grad", None)),
    )
    optimizer = ShardedMegatronOptimizer(inner, config, built.pairs, built.counted, groups)
    optimizer.chunks, optimizer.is_adamw_only = tuple(chunks), route is all_adamw
    optimizer.clip_logits(chunks)
    optimizer.watch(chunks)
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.info("parameters of rank 0 and who updates them:\n%s", format_table(table_rows(routes, options)))
    return optimizer


def sharded_groups(chunks: Sequence[HpFsdpModel]) -> MegatronGroups:
    """Megatron's groups with the data-parallel ranks over which norms add up.

    Args:
        chunks: Wrapped chunks of this rank.

    Returns:
        The groups.
    """
    first = chunks[0]

    def axes(mesh: ShardMesh) -> tuple[Any, ...]:
        owners = first.options.outer != "replicate" and mesh.replicate.size > 1
        return (mesh.shard, mesh.replicate) if owners else (mesh.shard,)

    expert = ShardMesh.divided(first.groups.expert_dp, first.options.replicas)
    return dataclasses.replace(first.groups, dense_shards=axes(first.dense_mesh), expert_shards=axes(expert))


def _refuse_thawed(specs: Mapping[torch.nn.Parameter, ParamSpec]) -> None:
    """Shards that were frozen when they were laid out are in no bucket of gradients: a spec tells of that time."""
    now = {shard: dataclasses.replace(spec, trainable=shard.requires_grad) for shard, spec in specs.items()}
    refuse_unreduced(now)


@contextlib.contextmanager
def _all_whole(chunks: Sequence[HpFsdpModel]) -> Iterator[dict[torch.nn.Parameter, _Home]]:
    """Register whole parameters on all chunks, and say where each belongs."""
    homes: dict[torch.nn.Parameter, _Home] = {}
    with contextlib.ExitStack() as stack:
        for chunk in chunks:
            found = stack.enter_context(chunk.whole_parameters())
            homes |= {whole: (chunk, *home) for whole, home in found.items()}
        yield homes


class _Builder:
    """Collects what this rank updates, shard by shard."""

    def __init__(self) -> None:
        self.pairs: list[ParamPair] = []
        self.counted: list[CountedParam] = []
        self.specs: dict[torch.nn.Parameter, ParamSpec] = {}
        self._mains: dict[torch.nn.Parameter, torch.nn.Parameter] = {}

    def take(self, home: _Home, spec: ParamSpec, algorithm: Algorithm, is_counted: bool) -> torch.nn.Parameter | None:
        """The main shard of a parameter, or None if this rank updates none of it."""
        chunk, bucket, parameter = home
        shard = parameter.sharded
        if not shard.numel() or not chunk.is_owned(bucket, parameter):
            return None
        main = main_param(shard)
        self._mains[shard] = main
        self.pairs.append(ParamPair(shard, main))
        self.counted.append(CountedParam(spec, main, algorithm, is_counted))
        self.specs[main] = spec
        return main

    def shares(
        self, muon: Mapping[torch.nn.Parameter, ParamSpec], chunks: Sequence[HpFsdpModel], options: HpMuon
    ) -> list[Share]:
        """Muon's weights that this replica updates, by shard axis; the same on all ranks of an axis."""
        device = chunks[0].schedule.device.type
        found: dict[tuple[AxisGroup, AxisGroup], list[Held]] = {}
        for chunk in chunks:
            for unit in chunk.schedule.units:
                for bucket in unit.trainable:
                    for index, parameter in enumerate(bucket.parameters):
                        if parameter.full in muon and chunk.is_owned(bucket, parameter):
                            main = self._mains.get(parameter.sharded)
                            told = (ShardedParam(muon[parameter.full], cuts(bucket, index)), main, parameter.sharded)
                            found.setdefault((bucket.shard_axis, bucket.mesh.replicate), []).append(told)
        has_owners = chunks[0].options.outer is not OuterMode.replicate
        return [
            divided_share(axis, AxisGroup.single("owner") if has_owners else replicas, held, options, device)
            for (axis, replicas), held in found.items()
        ]
