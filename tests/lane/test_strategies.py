"""Strategies of the distributed step under Megatron over shards: one trains as another, early or not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_pool import run_ranks

from hp_muon_plugin.config.choices import ClipMode, OuterMode, Precision, Strategy
from hp_muon_plugin.config.data_parallel import HpFsdp
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.trainer import Checkpoint, Model, Topology, Train
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.muon.distributed.plan import Route
from hp_muon_plugin.train import setup
from hp_muon_plugin.train.setup import Launch
from lane.harness import VOCAB, Ready, build, dense, moe, start, train, train_config, whole_weights
from lane.resuming import run
from lane.test_fsdp_parity import relative

STEPS = 4
UNCLIPPED = {"clip_grad": 0.5, "clip_mode": ClipMode.adamw_only}


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


def _overlapping(launch: Launch, overlap: bool, config: Train) -> Any:
    """Losses, norms, bytes of buffers, weights, this rank's state, and before which steps exchanges had begun."""
    ready = build(launch, config)
    optimizer, begun = ready.optimizer, list[bool]()
    assert optimizer.optimizer.config.overlap_backward is overlap
    step = optimizer.step

    def noted() -> Any:
        begun.append(optimizer.optimizer.has_begun)
        return step()

    optimizer.step = noted
    train(ready, STEPS)
    state = [value for held in optimizer.optimizer.state.values() for value in held.values()]
    return ready.losses, ready.norms, optimizer.optimizer._workspace.nbytes, whole_weights(ready), state, begun


@pytest.mark.parametrize(
    ("ranks", "model", "dp", "precision", "topology"),
    [
        (2, dense(), HpFsdp(), Precision.fp32, Topology()),
        pytest.param(2, dense(), HpFsdp(shard_accumulated=True), Precision.bf16, Topology(), marks=pytest.mark.once),
        pytest.param(
            4,
            dense(),
            HpFsdp(replicas=2, outer=OuterMode.shard),
            Precision.bf16,
            Topology(),
            marks=pytest.mark.once,
        ),
        pytest.param(4, moe(), HpFsdp(), Precision.bf16, Topology(ep=2), marks=pytest.mark.once),
    ],
    ids=["dense", "accumulated", "2x2", "moe"],
)
def test_steps_that_begin_in_backward_are_the_same_steps(
    ranks: int, model: Model, dp: HpFsdp, precision: Precision, topology: Topology
) -> None:
    runs = []
    for overlap in (True, False):
        config = _config(model, dp, precision, strategy=Strategy.alltoall, overlap_backward=overlap, **UNCLIPPED)
        config.topology = topology
        runs.append(run_ranks(ranks, _overlapping, overlap, config))
    for (*same, weights, state, begun), (*others, other_weights, other_state, other_begun) in zip(*runs, strict=True):
        assert same == others
        assert begun == [True] * STEPS
        assert other_begun == [False] * STEPS
        assert all(torch.equal(weight, other_weights[name]) for name, weight in weights.items())
        assert all(torch.equal(one, other) for one, other in zip(state, other_state, strict=True))


@pytest.mark.once
def test_a_run_that_begins_in_backward_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    def config(overlap: bool, **checkpoint: Any) -> Train:
        ready = _config(
            dense(), HpFsdp(), Precision.bf16, strategy=Strategy.gram, overlap_backward=overlap, **UNCLIPPED
        )
        return replace(ready, checkpoint=Checkpoint(save=str(tmp_path / str(overlap)), **checkpoint))

    without = run(2, config(False, every=2), STEPS)
    run(2, config(True, every=2), 2)
    resumed = run(2, config(True, resume=str(tmp_path / "True" / "iter_0000002")), STEPS)
    for one, other in zip(without, resumed, strict=True):
        assert other.begin == 2
        assert other.losses == one.losses[2:]
        assert one.state.keys() == other.state.keys() != set()
        assert all(torch.equal(value, other.state[name]) for name, value in one.state.items())
        assert all(torch.equal(weight, other.weights[name]) for name, weight in one.weights.items())


def _refused(launch: Launch, config: Train, is_per_token: bool) -> str:
    platform = start(launch, config)
    model, core_config = setup.build_model(config, VOCAB, platform)
    core_config.calculate_per_token_loss = is_per_token
    try:
        setup.build_optimizer(config, model)
    except ConfigError as error:
        return str(error)
    return "built"


@pytest.mark.once
def test_gradients_that_change_after_backward_are_refused() -> None:
    options = {"overlap_backward": True, **UNCLIPPED}
    sharded = _config(dense(), HpFsdp(), **options)
    wide = train_config(dense(), Topology(tp=2), dp=HpFsdp(), optimizer=sharded.optimizer)
    replicated = train_config(dense(), optimizer=sharded.optimizer)
    for config, is_per_token, text in (
        (sharded, True, "true with calculate_per_token_loss=True: begins a step with gradients as backward leaves"),
        (wide, False, "true with tp=2: begins a step with gradients as backward leaves them"),
        (replicated, False, "true with this model: nothing tells while backward runs which gradients are reduced"),
        (sharded, False, ""),
    ):
        for told in run_ranks(2, _refused, config, is_per_token):
            assert told.startswith(f"optimizer.overlap_backward={text}") if text else told == "built"
