"""What megatron-core itself needs, by version, to train on CPU over gloo.

The stand-in for ``torch.cuda`` is in platform/standin. These are the places where megatron-core
assumes a compiler or NCCL in its own code, and, before them, what it needs without Transformer
Engine anywhere. Applied only together with the stand-in.
"""

import logging
import sys
from typing import Any

import torch
import torch.distributed as dist

from hp_muon_plugin.megatron.local_fixes import Fix, apply_fixes, apply_local_fixes
from hp_muon_plugin.platform import standin
from hp_muon_plugin.platform.patching import Patcher, Replacement

_patcher = Patcher()


def apply_cpu_fixes() -> tuple[str, ...]:
    """Apply the fixes that the installed megatron-core needs. Calling it again changes nothing.

    Returns:
        Names of the fixes for this version, those of models without Transformer Engine included.
    """
    assert standin.is_active(), "CPU fixes belong to the torch.cuda stand-in"
    applied = apply_fixes(
        _patcher, CPU_FIXES
    )  # first: the others import megatron-core, which decorates as it finds torch
    return apply_local_fixes() + applied


def remove_cpu_fixes() -> None:
    """Put megatron-core's own code back, but for the fixes that other devices need too.

    What it decorated with ``torch.compile`` while these were applied stays as it was written.
    """
    _patcher.restore()


def _compile() -> list[Replacement]:
    def make(original: Any) -> Any:
        def compile(model: Any = None, **options: Any) -> Any:
            """As torch's own does with ``disable=True``."""
            return (lambda function: function) if model is None else model

        return compile

    why = "megatron-core's jit_fuser, whose CPU backend needs a compiler and a minute, and its import a second a rank"
    found = [Replacement(torch, "compile", make, why)]
    if "torch._dynamo" in sys.modules:  # what was decorated before calls it
        why = "what torch.compile was given before compiles when it is called"
        found.append(Replacement(sys.modules["torch._dynamo"].config, "disable", lambda original: True, why))
    return found


def _random_warning() -> list[Replacement]:
    log = logging.getLogger("megatron.core.tensor_parallel.random")
    why = "warns that the CPU generator changed inside the device's random context, and here it is the device's"
    return [Replacement(log, "disabled", lambda original: True, why)]


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


def _uneven_rows() -> list[Replacement]:
    """Tensor-parallel ranks of experts exchange as many rows as tokens came to each."""

    def make_gather(original: Any) -> Any:
        def all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
            most = _uneven(tensor_list)
            if most is None:
                return original(tensor_list, tensor, group=group, async_op=async_op)
            assert not async_op
            padded = [tensor.new_empty(most, *tensor.shape[1:]) for _ in tensor_list]
            original(padded, _padded(tensor, most), group=group)
            for target, source in zip(tensor_list, padded, strict=True):
                target.copy_(source[: len(target)])
            return None

        return all_gather

    def make_scatter(original: Any) -> Any:
        def reduce_scatter(
            output: Any, input_list: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
        ) -> Any:
            most = _uneven(input_list)
            if most is None:
                return original(output, input_list, op, group=group, async_op=async_op)
            assert not async_op
            summed = output.new_empty(most, *output.shape[1:])
            original(summed, [_padded(tensor, most) for tensor in input_list], op, group=group)
            output.copy_(summed[: len(output)])
            return None

        return reduce_scatter

    why = "gloo takes equal sizes only, and experts under tensor parallelism have unequal ones"
    return [
        Replacement(dist, "all_gather", make_gather, why),
        Replacement(dist, "reduce_scatter", make_scatter, why),
    ]


def _uneven(tensors: list[torch.Tensor]) -> int | None:
    """The most rows of some tensors, or None where all have as many."""
    rows = {len(tensor) if tensor.dim() else 1 for tensor in tensors}
    return max(rows) if len(rows) > 1 else None


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])


def _meshes() -> list[Replacement]:
    from torch.distributed.device_mesh import DeviceMesh

    def make(original: Any) -> Any:
        def from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:
            return original(group, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

        return staticmethod(from_group)

    why = "fully sharded wrappers make meshes of CUDA devices, for which torch's fully_shard looks for memory there"
    return [Replacement(DeviceMesh, "from_group", make, why)]


CPU_FIXES: tuple[Fix, ...] = (
    Fix("no-torch-compile", (0, 12), (0, 19), _compile),
    Fix("one-random-generator", (0, 12), (0, 19), _random_warning),
    Fix("all-to-all-split-sizes", (0, 12), (0, 19), _split_sizes),
    Fix("uneven-rows-over-gloo", (0, 12), (0, 19), _uneven_rows),
    Fix("meshes-of-cuda", (0, 12), (0, 19), _meshes),
)
