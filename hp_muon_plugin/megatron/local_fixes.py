"""What megatron-core itself needs, by version, for models without Transformer Engine, on every device.

Our models use megatron-core's local layers, which are also what there is where Transformer Engine is
not installed. These are the places where megatron-core forgot that case. Each fix names its versions
and does nothing where it finds nothing to repair.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy

from hp_muon_plugin.megatron.versions import CoreVersion, core_version
from hp_muon_plugin.platform.patching import Patcher, Replacement

_patcher = Patcher()


@dataclass(frozen=True, slots=True)
class Fix:
    """One fix.

    Attributes:
        name: Short name for reports.
        first: First lane that needs it.
        last: Last tested lane that needs it.
        make: Imports what it needs and returns the replacements.
    """

    name: str
    first: tuple[int, int]
    last: tuple[int, int]
    make: Callable[[], list[Replacement]]


def apply_local_fixes() -> tuple[str, ...]:
    """Apply the fixes that the installed megatron-core needs. Calling it again changes nothing.

    Returns:
        Names of the fixes for this version.
    """
    return apply_fixes(_patcher, LOCAL_FIXES)


def remove_local_fixes() -> None:
    """Put megatron-core's own code back."""
    _patcher.restore()


def apply_fixes(patcher: Patcher, fixes: tuple[Fix, ...]) -> tuple[str, ...]:
    """Apply those of some fixes that the installed megatron-core needs, unless a patcher has done so.

    Args:
        patcher: Remembers the originals.
        fixes: In order.

    Returns:
        Names of the fixes for this version.
    """
    needed = needed_fixes(core_version(), fixes)
    if not patcher.applied:
        for fix in needed:
            patcher.apply(fix.make(), aliases_in="megatron")
    return tuple(fix.name for fix in needed)


def needed_fixes(version: CoreVersion, fixes: tuple[Fix, ...]) -> list[Fix]:
    """The fixes for one version.

    Args:
        version: A megatron-core version.
        fixes: Fixes in order.

    Returns:
        Those that it needs.
    """
    return [fix for fix in fixes if fix.first <= version.lane <= fix.last]


def _te_gemm() -> list[Replacement]:
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if hasattr(moe_utils, "te_general_gemm"):
        return []
    why = "the router looks the name up, and it is undefined without Transformer Engine"
    return [Replacement(moe_utils, "te_general_gemm", lambda original: None, why)]


def _quantize_nothing() -> list[Replacement]:
    module = importlib.import_module("megatron.core.optimizer.distrib_optimizer")

    def make(original: Any) -> Any:
        def quantize_param_shard(model_params: Any, *args: Any, **kwargs: Any) -> Any:
            return original(model_params, *args, **kwargs) if len(model_params) else None

        return quantize_param_shard

    why = "DistributedOptimizer quantises an empty list and raises without Transformer Engine"
    return [Replacement(module, "quantize_param_shard", make, why)]


def _sequence_parallel_norm() -> list[Replacement]:
    module = importlib.import_module("megatron.core.transformer.torch_norm")

    def make(original: Any) -> Any:
        def new(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
            wanted, config.sequence_parallel = config.sequence_parallel, False
            try:
                norm = original(cls, config, *args, **kwargs)
            finally:
                config.sequence_parallel = wanted
            for param in norm.parameters():
                param.sequence_parallel = wanted
            return norm

        return staticmethod(new)

    why = "torch norms refuse sequence parallelism; their weights only need the mark that sums their gradients over TP"
    return [Replacement(module.WrappedTorchNorm, "__new__", make, why)]


def _latent_attention() -> list[Replacement]:
    module = importlib.import_module("megatron.core.transformer.dot_product_attention")

    def make(original: Any) -> Any:
        def init(self: Any, *args: Any, k_channels: Any = None, v_channels: Any = None, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if v_channels is not None:  # the width of what forward returns; elsewhere it reads the tensors' shapes
                self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
            if k_channels is not None:
                self.hidden_size_per_attention_head = k_channels

        return init

    why = "multi-latent attention passes head sizes that only the Transformer Engine attention takes"
    found = [Replacement(module.DotProductAttention, "__init__", make, why)]
    mla = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    if core_version().lane == (0, 16) and mla.HAVE_TE and not isinstance(mla.TELinear, type):
        found.append(Replacement(mla, "HAVE_TE", lambda original: False, "isinstance check against a missing class"))
    return found


def _writer() -> list[Replacement]:
    """Distributed checkpoints of 0.12 with numpy 2 and torch 2.8 or later."""
    module = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    found = []
    if not hasattr(numpy, "product"):
        why = "numpy 2 has no other name for prod"
        found.append(Replacement(numpy, "product", lambda original: numpy.prod, why))
    if "serialization_format" in inspect.signature(module._write_item).parameters:
        filesystem = importlib.import_module("torch.distributed.checkpoint.filesystem")
        form = {"serialization_format": filesystem.SerializationFormat.TORCH_SAVE}
        why = "torch's function wants to be told the format"
        found.append(Replacement(module, "_write_item", lambda original: functools.partial(original, **form), why))
    return found


LOCAL_FIXES: tuple[Fix, ...] = (
    Fix("router-without-te", (0, 16), (0, 16), _te_gemm),
    Fix("checkpoint-writer", (0, 12), (0, 12), _writer),
    Fix("quantize-empty-list", (0, 12), (0, 12), _quantize_nothing),
    Fix("norm-under-sequence-parallel", (0, 12), (0, 19), _sequence_parallel_norm),
    Fix("latent-attention-head-sizes", (0, 12), (0, 19), _latent_attention),
)
