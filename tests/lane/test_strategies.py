"""Strategies of the distributed step under Megatron over shards: one trains as another."""

from typing import Any

import torch
from dist_pool import run_ranks

from hp_muon_plugin.config.choices import Precision, Strategy
from hp_muon_plugin.config.data_parallel import HpFsdp
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.trainer import Model, Train
from hp_muon_plugin.muon.distributed.plan import Route
from hp_muon_plugin.train.setup import Launch
from lane.harness import Ready, build, dense, train, train_config, whole_weights
from lane.test_fsdp_parity import relative

STEPS = 4


def _config(model: Model, dp: HpFsdp, precision: Precision = Precision.fp32, **options: Any) -> Train:
    optimizer = HpMuon(lr=5e-3, weight_decay=0.1, **options)
    return train_config(model, dp=dp, optimizer=optimizer, precision=precision, steps=STEPS)


def _routes(ready: Ready) -> set[Route]:
    return {batch.route for plan in ready.optimizer.optimizer.share_plans for batch in plan.batches}


def _by_strategy(launch: Launch, strategy: Strategy) -> tuple[list[float], dict[str, torch.Tensor], set[Route]]:
    ready = train(build(launch, _config(dense(), HpFsdp(), strategy=strategy)), STEPS)
    return ready.losses, whole_weights(ready), _routes(ready)


def test_gram_trains_as_allgather() -> None:
    gram, gathered = (run_ranks(2, _by_strategy, strategy) for strategy in (Strategy.gram, Strategy.allgather))
    for (losses, weights, routes), (other_losses, others, other_routes) in zip(gram, gathered, strict=True):
        assert routes & {Route.GRAM, Route.GATHERED_GRAM}
        assert other_routes == {Route.EVERYWHERE}
        torch.testing.assert_close(losses, other_losses, rtol=1e-5, atol=0)
        worst = max((relative(weights[name], value), name) for name, value in others.items())
        assert worst[0] < 1e-5, worst
        assert any(not torch.equal(weights[name], value) for name, value in others.items())  # computed otherwise
