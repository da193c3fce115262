"""HP-FSDP in somebody else's trainer, which constructs Megatron's own DistributedDataParallel."""

from typing import Any

import pytest
from dist_pool import run_ranks

from hp_muon_plugin.config.choices import OuterMode
from hp_muon_plugin.config.data_parallel import HpFsdp
from hp_muon_plugin.config.optimizer import AdamW
from hp_muon_plugin.config.trainer import Topology
from hp_muon_plugin.errors import ConfigError, ConfigErrors
from hp_muon_plugin.train import setup
from hp_muon_plugin.train.setup import Launch
from lane.harness import VOCAB, build, moe, optimizer_config, start, train, train_config

OPTIONS = {"replicas": 2, "outer": "shard"}


def _foreign(launch: Launch) -> Any:
    from hp_muon_plugin.megatron import install

    install(data_parallel=OPTIONS)
    config = train_config(moe(), Topology(ep=2), optimizer=AdamW(lr=5e-3), global_batch=8)
    ready = train(build(launch, config), 3)
    return type(ready.model).__name__, ready.losses, ready.norms


def _own(launch: Launch) -> Any:
    dp = HpFsdp(replicas=2, outer=OuterMode.shard)
    config = train_config(moe(), Topology(ep=2), optimizer=AdamW(lr=5e-3), global_batch=8, dp=dp)
    ready = train(build(launch, config), 3)
    return "HpFsdpModel", ready.losses, ready.norms


def test_a_trainer_that_knows_only_megatrons_wrapper_trains_over_shards() -> None:
    assert run_ranks(4, _foreign) == run_ranks(4, _own)


def _optimizers(launch: Launch) -> Any:
    from megatron.core import optimizer as factory

    from hp_muon_plugin.megatron import install, uninstall
    from hp_muon_plugin.megatron.param_groups import standard_overrides

    platform = start(launch, train_config(moe()))
    install(data_parallel={})
    model, core = setup.build_model(train_config(moe()), VOCAB, platform)
    muon = optimizer_config("hp_muon")
    built = factory.get_megatron_optimizer(muon, [model], **standard_overrides(muon))
    with pytest.raises(ConfigError) as caught:
        factory.get_megatron_optimizer(optimizer_config("sgd"), [model])
    is_set = core.no_sync_func == model.no_sync
    uninstall()
    after = setup.build_model(train_config(moe()), VOCAB, platform)[0]
    return type(built).__name__, str(caught.value), is_set, type(model).__name__, type(after).__name__


def test_both_optimizers_are_ours_and_uninstall_gives_the_wrapper_back() -> None:
    for name, message, is_set, wrapped, after in run_ranks(2, _optimizers):
        assert name == "ShardedMegatronOptimizer"
        assert message.startswith("optimizer=sgd: would take shards for whole weights")
        assert is_set
        assert (wrapped, after) == ("HpFsdpModel", "DistributedDataParallel")


def test_options_of_the_wrapper_are_checked_at_once() -> None:
    from hp_muon_plugin.megatron import install
    from hp_muon_plugin.megatron.installation import installed

    with pytest.raises((ConfigError, ConfigErrors), match="data_parallel.outer=shard: says what replicas do"):
        install(data_parallel={"outer": "shard"})
    with pytest.raises(ConfigError, match="did you mean data_parallel.prefetch"):
        install(data_parallel={"prefetc": 1})
    assert installed() is None
