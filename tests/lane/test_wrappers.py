"""Data-parallel wrappers that cut matrices are refused when the optimizer is built."""

from types import SimpleNamespace
from typing import Any

import pytest
from dist_pool import run_ranks

from hp_muon_plugin.config.choices import Precision
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.megatron.versions import core_version
from hp_muon_plugin.train.setup import Launch
from lane.harness import VOCAB, dense, optimizer_config, start, train_config


def _torch_fsdp(launch: Launch) -> Any:
    import megatron.core.distributed as wrappers
    import megatron.core.distributed.torch_fully_sharded_data_parallel as upstream

    import hp_muon_plugin.megatron
    from hp_muon_plugin.models.gpt import build_gpt, transformer_config

    config = train_config(dense())
    start(launch, config)
    core = transformer_config(config.model, config.topology, Precision.fp32)
    mesh = upstream.DeviceMesh
    upstream.DeviceMesh = SimpleNamespace(from_group=lambda group, kind: mesh.from_group(group, "cpu"))  # says "cuda"
    ddp_config = wrappers.DistributedDataParallelConfig()
    model = wrappers.TorchFullyShardedDataParallel(core, ddp_config, build_gpt(core, config.model, VOCAB + 8))
    import megatron.core.optimizer as factory

    hp_muon_plugin.megatron.install(HpMuon())
    try:
        factory.get_megatron_optimizer(optimizer_config(), [model])
    except ConfigError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("ranks", [1, 2])
def test_torchs_fully_shard_is_refused_by_name(ranks: int) -> None:
    """It has a ddp_config in newer versions, and so it got through the check of the wrapper."""
    if core_version().lane < (0, 16):
        pytest.skip("megatron-core 0.12 shards a layer and then its linear layers again, which torch refuses")
    for text in run_ranks(ranks, _torch_fsdp):
        assert text.startswith("model_chunks=module.")
        assert "is a DTensor (torch's fully_shard" in text
        assert "use-torch-fsdp2" in text
