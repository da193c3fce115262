"""What is patched: first what Megatron imports, then Megatron."""

import functools

import torch

from mindspeed.args_utils import get_mindspeed_args
from mindspeed.patch_utils import MindSpeedPatchesManager as Manager

BUILT = []
"""Optimizers that came through the wrapper, which a feature puts around Megatron's factory always."""


def get_megatron_optimizer_wrapper(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        built = function(*args, **kwargs)
        BUILT.append(built)
        return built

    return wrapper


def get_megatron_optimizer_muon_wrapper(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        raise AssertionError("another Muon")

    return wrapper


def start_param_sync(self, *unused, force_sync=False, force_dispatch=False, dense_or_moe_group=None):
    return None


def patch(args):
    Manager.register_patch("transformer_engine.pytorch.Linear", torch.nn.Module, create_dummy=True)
    Manager.apply_patches()
    Manager.register_patch("megatron.core.optimizer.get_megatron_optimizer", get_megatron_optimizer_wrapper)
    if args.optimizer == "muon":
        Manager.register_patch("megatron.core.optimizer.get_megatron_optimizer", get_megatron_optimizer_muon_wrapper)
    Manager.register_patch(
        "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel.start_param_sync", start_param_sync
    )
    Manager.apply_patches()


def repatch(values):
    args = get_mindspeed_args()
    Manager.remove_patches()
    for name, value in values.items():
        setattr(args, name, value)
    patch(args)
