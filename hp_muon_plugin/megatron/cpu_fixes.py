"""What megatron-core itself needs, by version, to train on CPU over gloo.

The stand-in for ``torch.cuda`` is in platform/standin. These are the places where megatron-core
assumes Transformer Engine or NCCL in its own code. Each fix names the versions it is for, and is
applied only together with the stand-in.
"""

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hp_muon_plugin.megatron.versions import CoreVersion, core_version
from hp_muon_plugin.platform import standin
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


def apply_cpu_fixes() -> tuple[str, ...]:
    """Apply the fixes that the installed megatron-core needs. Calling it again changes nothing.

    Returns:
        Names of the fixes that are in place.
    """
    assert standin.is_active(), "CPU fixes belong to the torch.cuda stand-in"
    fixes = needed_fixes(core_version())
    if not _patcher.applied:
        for fix in fixes:
            _patcher.apply(fix.make(), aliases_in="megatron")
    return tuple(fix.name for fix in fixes)


def remove_cpu_fixes() -> None:
    """Put megatron-core's own code back."""
    _patcher.restore()


def needed_fixes(version: CoreVersion) -> list[Fix]:
    """The fixes for one version.

    Args:
        version: A megatron-core version.

    Returns:
        Fixes in order.
    """
    return [fix for fix in FIXES if fix.first <= version.lane <= fix.last]


def _dynamo() -> list[Replacement]:
    import torch._dynamo

    why = "megatron-core's jit_fuser is torch.compile, whose CPU backend needs a compiler and a minute"
    return [Replacement(torch._dynamo.config, "disable", lambda original: True, why)]


def _random_warning() -> list[Replacement]:
    log = logging.getLogger("megatron.core.tensor_parallel.random")
    why = "warns that the CPU generator changed inside the device's random context, and here it is the device's"
    return [Replacement(log, "disabled", lambda original: True, why)]


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


def _split_sizes() -> list[Replacement]:
    def make(original: Any) -> Any:
        def all_to_all_single(
            output: Any,
            input: Any,
            output_split_sizes: Any = None,
            input_split_sizes: Any = None,
            group: Any = None,
            async_op: bool = False,
        ) -> Any:
            sizes = [s.tolist() if isinstance(s, torch.Tensor) else s for s in (output_split_sizes, input_split_sizes)]
            return original(output, input, *sizes, group=group, async_op=async_op)

        return all_to_all_single

    why = "the token dispatcher turns split sizes into lists only when they are CUDA tensors"
    return [Replacement(dist, "all_to_all_single", make, why)]


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

        return init

    why = "multi-latent attention passes head sizes that only the Transformer Engine attention takes"
    found = [Replacement(module.DotProductAttention, "__init__", make, why)]
    mla = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    if core_version().lane == (0, 16) and hasattr(mla, "HAVE_TE"):
        found.append(Replacement(mla, "HAVE_TE", lambda original: False, "isinstance check against a missing class"))
    return found


FIXES: tuple[Fix, ...] = (
    Fix("no-torch-compile", (0, 12), (0, 19), _dynamo),
    Fix("one-random-generator", (0, 12), (0, 19), _random_warning),
    Fix("router-without-te", (0, 16), (0, 16), _te_gemm),
    Fix("quantize-empty-list", (0, 12), (0, 12), _quantize_nothing),
    Fix("all-to-all-split-sizes", (0, 12), (0, 19), _split_sizes),
    Fix("norm-under-sequence-parallel", (0, 12), (0, 19), _sequence_parallel_norm),
    Fix("latent-attention-head-sizes", (0, 12), (0, 19), _latent_attention),
)
