"""megatron-core's own FullyShardedDataParallel, as its trainers build it, to compare with."""

import inspect
from dataclasses import fields
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig

from hp_muon_plugin.config.data_parallel import MegatronFsdp
from hp_muon_plugin.megatron.versions import core_version

_GRAD = "main_grad"


def wrap_in_megatron_fsdp(config: Any, module: torch.nn.Module, options: MegatronFsdp) -> torch.nn.Module:
    """Wrap a model chunk.

    Args:
        config: megatron-core's ``TransformerConfig``; its ``no_sync_func`` is set, without which Megatron-FSDP
            does not know the last micro-batch.
        module: The chunk, on its device.
        options: Options.

    Returns:
        The wrapped chunk. Its optimizer is Megatron's DistributedOptimizer.
    """
    if core_version().lane < (0, 16):
        from megatron.core.distributed.custom_fsdp import FullyShardedDataParallel

        own = {"use_custom_fsdp": True}
    else:
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

        own = {"use_megatron_fsdp": True}
    values: dict[str, Any] = {
        **own,
        "use_distributed_optimizer": True,
        "data_parallel_sharding_strategy": str(options.sharding),
        "overlap_grad_reduce": options.overlap,
        "overlap_param_gather": options.overlap,
        "gradient_reduce_div_fusion": False,  # a reduction that only NCCL has
    }
    known = {field.name for field in fields(DistributedDataParallelConfig)}
    ddp_config = DistributedDataParallelConfig(**{name: value for name, value in values.items() if name in known})
    device = next(module.parameters()).device
    takes_device = "device" in inspect.signature(FullyShardedDataParallel.__init__).parameters
    wrapped: Any = FullyShardedDataParallel(
        config=config, ddp_config=ddp_config, module=module, **({"device": device} if takes_device else {})
    )
    if core_version().lane >= (0, 16):
        config.no_sync_func = wrapped.no_sync
    _leave_others_alone(type(next(module.parameters())))
    return wrapped  # type: ignore[no-any-return]


def _leave_others_alone(kind: type[torch.nn.Parameter]) -> None:
    """Give parameters of other models their own ``main_grad`` back.

    0.12.1 makes it a property of the class, which finds no buffer where a parameter is not Megatron-FSDP's.

    Args:
        kind: The class of parameters.
    """
    found = vars(kind).get(_GRAD)
    if not isinstance(found, property) or found.fset is not None:
        return

    def read(parameter: Any) -> Any:
        if hasattr(parameter, "_gbuf"):
            return found.__get__(parameter)
        if _GRAD not in vars(parameter):
            raise AttributeError(_GRAD)
        return vars(parameter)[_GRAD]

    def write(parameter: Any, value: Any) -> None:
        vars(parameter)[_GRAD] = value

    def remove(parameter: Any) -> None:
        del vars(parameter)[_GRAD]

    setattr(kind, _GRAD, property(read, write, remove))
