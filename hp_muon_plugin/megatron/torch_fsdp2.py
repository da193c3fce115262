"""megatron-core's TorchFullyShardedDataParallel, and the plugin's optimizers over its DTensors.

Each DTensor stands for a chunk of dim 0 of a weight. The optimizer updates that chunk as a plain tensor:
a parameter that shares its memory, or a float32 master of it.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.distributed.tensor import DTensor

from hp_muon_plugin.config.data_parallel import TorchFsdp2
from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.fsdp.parameter import ShardInfo
from hp_muon_plugin.layout.cuts import Cuts
from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.megatron.build import muon_routes
from hp_muon_plugin.megatron.groups import MegatronGroups, megatron_groups
from hp_muon_plugin.megatron.main_params import ParamPair, main_param
from hp_muon_plugin.megatron.norms import CountedParam, counts_here
from hp_muon_plugin.megatron.optimizer import HpMuonMegatronOptimizer
from hp_muon_plugin.megatron.param_groups import divide_groups, upstream_groups
from hp_muon_plugin.megatron.sharded_build import adamw_only, all_adamw
from hp_muon_plugin.megatron.specs import chunk_specs
from hp_muon_plugin.muon.distributed.items import ShardedParam, dim0_cuts
from hp_muon_plugin.muon.distributed.optimizer import ShardedMuonOptimizer
from hp_muon_plugin.muon.distributed.shards import local_part
from hp_muon_plugin.muon.distributed.share import Share
from hp_muon_plugin.muon.routing import Algorithm
from hp_muon_plugin.muon.table import format_table, table_rows

logger = logging.getLogger(__name__)

_UNITS = {TransformerLayer, MultiTokenPredictionLayer, LanguageModelEmbedding}
"""What is sharded by itself besides the root. megatron-core 0.12 and 0.16 would also shard the linear layers inside
of layers, which torch 2.13 refuses; newer versions leave them out as well where Transformer Engine is missing."""


class TorchFsdp2Model(TorchFullyShardedDataParallel):  # type: ignore[misc]  # megatron-core is untyped
    """A model chunk whose parameters are DTensors of torch's ``fully_shard``.

    Args:
        config: megatron-core's ``TransformerConfig``.
        module: The chunk, on its device.
        options: Options.
    """

    def __init__(self, config: Any, module: torch.nn.Module, options: TorchFsdp2) -> None:
        ddp_config = DistributedDataParallelConfig()
        ddp_config.reshard_after_forward = options.reshard_after_forward  # read by 0.16 and later
        super().__init__(config, ddp_config, module, sub_modules_to_wrap=_UNITS)
        self.ddp_config = ddp_config  # 0.12 forgets it, and finalize_model_grads reads it

    def finish_grad_sync(self, *unused: Any, **also_unused: Any) -> None:
        """Nothing to wait for. (Before 0.18 megatron-core's own does not take what its trainers pass.)"""

    def zero_grad_buffer(self) -> None:
        """Begin a step."""
        for param in self.parameters():
            param.grad = None

    def scale_gradients(self, scaling_factor: Any) -> None:
        """Multiply all gradients; megatron-core's own forgets it.

        Args:
            scaling_factor: A number or a 0-dim tensor.
        """
        for param in self.parameters():
            if param.grad is not None:
                local_part(param.grad).mul_(scaling_factor)


class DTensorMegatronOptimizer(HpMuonMegatronOptimizer):
    """:class:`HpMuonMegatronOptimizer` over this rank's chunks of DTensors."""

    wholes: Sequence[torch.nn.Parameter] = ()
    """The model's parameters, in the order of the pairs."""

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Take the gradients that backward and ``finalize_model_grads`` left on DTensors; then as always.

        Returns:
            True if the step must be left out.
        """
        for whole, pair in zip(self.wholes, self._pairs, strict=True):
            chunk: Any = pair.model
            chunk.main_grad = None if whole.grad is None else local_part(whole.grad)
        return super().prepare_grads()

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: Megatron's checkpoints would take chunks for whole parameters.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError("dp", "torch_fsdp2", "is here to compare with, and saves nothing", "take dp=hp_fsdp")


def build_over_dtensors(
    config: Any, chunks: Sequence[TorchFsdp2Model], options: HpMuon | AdamW
) -> DTensorMegatronOptimizer:
    """Muon or AdamW over what ``fully_shard`` left on this rank. Every rank calls it.

    Args:
        config: megatron-core's ``OptimizerConfig``.
        chunks: Wrapped chunks.
        options: Options.

    Returns:
        The optimizer. Rank 0 logs the routing table.
    """
    settings = options if isinstance(options, HpMuon) else adamw_only(options)
    plain = megatron_groups()
    groups = dataclasses.replace(plain, dense_shards=(plain.dp,), expert_shards=(plain.dp,))
    specs = chunk_specs(chunks, settings, groups)
    routes = muon_routes(settings, specs) if isinstance(options, HpMuon) else all_adamw(specs)
    algorithms = {param: route.algorithm for param, route in zip(specs, routes, strict=True)}
    divided = divide_groups(
        upstream_groups(config, chunks, {}), dict(zip(specs, routes, strict=True)), settings, config
    )
    held = {param: _chunk(param, specs[param], groups) for group in divided for param in group["params"]}
    wholes, pairs, counted = [], [], []
    for group in divided:
        mains = []
        for param in group["params"]:
            chunk = held[param]
            if chunk.numel():
                main = main_param(chunk)
                mains.append(main)
                wholes.append(param)
                pairs.append(ParamPair(chunk, main))
                is_counted = counts_here(param, specs[param], groups)
                counted.append(CountedParam(specs[param], main, algorithms[param], is_counted))
        group["params"] = mains
    main_of = {whole: pair.main for whole, pair in zip(wholes, pairs, strict=True)}
    shared = [param for param in specs if algorithms[param] is Algorithm.muon and param in held]
    share = Share(
        groups.dp,
        tuple(ShardedParam(specs[param], _cuts(param, groups)) for param in shared),
        tuple(main_of.get(param) for param in shared),
    )
    inner = ShardedMuonOptimizer(
        divided,
        {main: specs[whole] for whole, main in main_of.items()} | _frozen(specs),
        settings,
        axes=groups.axes,
        shares=[share] if shared else [],
        device=local_part(next(chunks[0].parameters()).detach()).device,
    )
    optimizer = DTensorMegatronOptimizer(inner, config, pairs, counted, groups)
    optimizer.wholes = tuple(wholes)
    if dist.get_rank() == 0:
        logger.info("parameters of rank 0 and who updates them:\n%s", format_table(table_rows(routes, settings)))
    return optimizer


def _chunk(param: torch.nn.Parameter, spec: ParamSpec, groups: MegatronGroups) -> torch.nn.Parameter:
    """This rank's part as a parameter that shares memory with the DTensor and has Megatron's marks."""
    assert isinstance(param, DTensor), spec.name
    chunk = torch.nn.Parameter(local_part(param.detach()))
    vars(chunk).update(vars(param))
    cuts, place = _cuts(param, groups), groups.dp.index
    assert cuts[place + 1] - cuts[place] == chunk.numel(), spec.name
    chunk.hp_shard = ShardInfo(spec.name, param.shape, cuts[place], cuts[place + 1])  # type: ignore[attr-defined]
    return chunk


def _cuts(param: torch.nn.Parameter, groups: MegatronGroups) -> Cuts:
    return dim0_cuts(param.shape, groups.dp.size)


def _frozen(specs: Mapping[torch.nn.Parameter, ParamSpec]) -> dict[torch.nn.Parameter, ParamSpec]:
    return {param: spec for param, spec in specs.items() if not spec.trainable}
