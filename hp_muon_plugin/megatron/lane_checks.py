"""What the installed megatron-core version gets wrong or cannot do, refused before training starts."""

import importlib.util
from collections.abc import Iterator

from hp_muon_plugin.config.data_parallel import MegatronFsdp, TorchFsdp2
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.errors import ConfigError, HookError, raise_all
from hp_muon_plugin.megatron.versions import CoreVersion, core_version
from hp_muon_plugin.platform import mindspeed


def lane_errors(config: Train) -> list[ConfigError]:
    """What :func:`check_lane` would refuse, for plans, which need no megatron-core.

    Args:
        config: Options that are valid in themselves.

    Returns:
        Findings; none where megatron-core is not installed.
    """
    try:
        return list(_errors(config, core_version()))
    except HookError:
        return []


def check_lane(config: Train) -> None:
    """Refuse what the installed megatron-core gets wrong or cannot do.

    Args:
        config: Options that are valid in themselves.

    Raises:
        ConfigError: If this version cannot train it rightly.
        ConfigErrors: If several things are wrong.
    """
    raise_all(list(_errors(config, core_version())))


def _errors(config: Train, version: CoreVersion) -> Iterator[ConfigError]:
    model, topology = config.model, config.topology
    if model.moe and topology.ep == 1 and topology.etp != topology.tp and version.lane < (0, 19):
        yield ConfigError(
            "topology.etp",
            topology.etp,
            f"megatron-core {version} does not add up expert gradients over tensor-parallel ranks "
            f"unless topology.ep > 1 or etp = tp (here ep=1, tp={topology.tp}); experts would drift apart",
            f"set topology.ep=2 or more, or topology.etp={topology.tp}, or install megatron-core 0.19",
        )
    if model.num_query_groups % topology.tp and version.lane < (0, 16) and model.mla is None:
        yield ConfigError(
            "model.num_query_groups",
            model.num_query_groups,
            f"megatron-core {version} cannot split a query group over topology.tp={topology.tp} ranks",
            f"choose a multiple of {topology.tp}, or install megatron-core 0.16 or newer",
        )
    yield from _wrapper_errors(config, version)


def _wrapper_errors(config: Train, version: CoreVersion) -> Iterator[ConfigError]:
    dp, tp = config.dp, config.topology.tp
    if isinstance(dp, TorchFsdp2) and not dp.reshard_after_forward and version.lane < (0, 16):
        yield ConfigError(
            "dp.reshard_after_forward",
            False,
            f"megatron-core {version} has no such option for dp=torch_fsdp2",
            "set it to true, or install megatron-core 0.16 or newer",
        )
    if not isinstance(dp, MegatronFsdp):
        return
    if version.lane < (0, 16):
        yield ConfigError(
            "dp",
            "megatron_fsdp",
            f"the custom FSDP of megatron-core {version} counts a micro-batch's gradients twice, and stops at routers",
            "install megatron-core 0.16 or newer, or take dp=hp_fsdp",
        )
    elif version.lane < (0, 19) and tp > 1 and not _has_transformer_engine():
        yield ConfigError(
            "topology.tp",
            tp,
            f"Megatron-FSDP of megatron-core {version} looks for Transformer Engine's layers and fails without it "
            "(TypeError: isinstance() arg 2 must be a type)",
            "set topology.tp=1, or install Transformer Engine or megatron-core 0.19",
        )


def _has_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None and not mindspeed.is_dummy("transformer_engine")
