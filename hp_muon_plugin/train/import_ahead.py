"""What every rank of a training run imports, for all ranks at once where they are forked from one process."""

import importlib

from hp_muon_plugin.config.choices import PlatformName
from hp_muon_plugin.train.worker import quiet_logging

_MODULES = (
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "hp_muon_plugin.megatron.build",
    "hp_muon_plugin.megatron.sharded_build",
    "hp_muon_plugin.models.canonical_init",
    "hp_muon_plugin.models.gpt",
    "hp_muon_plugin.muon.distributed.optimizer",
    "hp_muon_plugin.train.loop",
    "hp_muon_plugin.train.setup",
    "torch._dynamo",  # torch's optimizers import it when the first one is built, 0.6 to 0.8 s in each rank
)


def import_ahead() -> None:
    """Import on a CPU, with what megatron-core needs there before it.

    Raises:
        PlatformError: If this machine has a device of another kind.
    """
    quiet_logging(is_first_rank=True)
    from hp_muon_plugin.platform.base import choose

    choose(PlatformName.cpu).prepare(local_rank=0)
    from hp_muon_plugin.megatron.cpu_fixes import apply_cpu_fixes

    apply_cpu_fixes()
    for name in _MODULES:
        importlib.import_module(name)
