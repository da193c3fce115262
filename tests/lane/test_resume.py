"""Runs that go on from a checkpoint: bit for bit on the same ranks, and on any others up to the order of sums."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dist_pool import RankError

from hp_muon_plugin.checkpoint.canonical import Momentum
from hp_muon_plugin.checkpoint.folders import MANIFEST
from hp_muon_plugin.checkpoint.manifest import manifest_text, read_manifest
from hp_muon_plugin.config.choices import OuterMode, Precision, ShardLayout
from hp_muon_plugin.config.data_parallel import HpFsdp
from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.config.trainer import Checkpoint, Topology, Train
from lane.harness import dense, moe, train_config
from lane.resuming import Outcome, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # several runs of two to four real ranks

EP2, STEPS = Topology(ep=2), 6


def _moe(topology: Topology, dp: HpFsdp | None = None, **values: object) -> Train:
    return train_config(moe(), topology, dp=dp, steps=STEPS, global_batch=12, **values)  # type: ignore[arg-type]


def _at(config: Train, save: Path, **options: object) -> Train:
    where = {"save": str(save)} if "every" in options or options.get("resume") == "auto" else {}
    return replace(config, checkpoint=Checkpoint(**where, **options))  # type: ignore[arg-type]


def _leg(ranks: int, config: Train, save: Path, stop: int) -> Outcome:
    """Go on to a step, and save there."""
    return run(ranks, _at(config, save, every=stop, resume="auto"), stop)[0]


def _assert_equal_runs(found: list[Outcome], wanted: list[Outcome]) -> None:
    for rank, (mine, other) in enumerate(zip(found, wanted, strict=True)):
        assert mine.losses == other.losses[mine.begin :], f"rank {rank}"
        assert mine.random == other.random[mine.begin :], f"rank {rank}"
        for name, weight in mine.weights.items():
            assert torch.equal(weight, other.weights[name]), name


def _assert_close_weights(found: Outcome, wanted: Outcome, *, most: float) -> None:
    assert found.weights.keys() == wanted.weights.keys()
    for name, weight in wanted.weights.items():
        error = float((found.weights[name].float() - weight.float()).norm() / weight.float().norm())
        assert error < most, (name, error)


def test_a_run_goes_on_over_every_wrapper_and_number_of_ranks(tmp_path: Path) -> None:
    """DDP, FSDP on 3 ranks, HSDP both ways, DDP with other experts per rank, pipeline stages: one run, five moves."""
    wanted = run(2, _at(_moe(EP2), tmp_path / "whole", every=1, asynchronous=True), STEPS)
    same = _at(_moe(EP2), tmp_path, resume=str(tmp_path / "whole" / "iter_0000002"))
    _assert_equal_runs(run(2, same, STEPS), wanted)

    save = tmp_path / "moved"
    save.mkdir()
    (tmp_path / "whole" / "iter_0000001").rename(save / "iter_0000001")
    by_row = HpFsdp(replicas=2, outer=OuterMode.broadcast, shard_layout=ShardLayout.per_param)
    legs = [
        _leg(3, _moe(Topology(), HpFsdp()), save, 2),
        _leg(4, _moe(EP2, by_row), save, 3),
        _leg(4, _moe(EP2, HpFsdp(replicas=2, outer=OuterMode.shard)), save, 4),
        _leg(4, _moe(Topology(ep=4)), save, 5),
        _leg(2, _moe(Topology(pp=2), HpFsdp()), save, 6),
    ]
    assert [leg.begin for leg in legs] == [1, 2, 3, 4, 5]
    losses = torch.tensor([loss for leg in legs for loss in leg.losses])
    torch.testing.assert_close(losses, torch.tensor(wanted[0].losses[1:]), rtol=2e-5, atol=0)
    _assert_close_weights(legs[-1], wanted[0], most=1e-4)  # five steps of sums in another order, and Newton-Schulz


def test_bf16_with_masters_that_one_replica_has_goes_on_bit_for_bit_and_under_tensor_parallelism(
    tmp_path: Path,
) -> None:
    """The masters and the momentum of each weight are on one replica; tied embeddings are stored once."""
    model = dense(tie_embeddings=True)

    def config(topology: Topology, dp: HpFsdp | None) -> Train:
        return train_config(model, topology, dp=dp, precision=Precision.bf16, steps=4, global_batch=4)

    hsdp = config(Topology(), HpFsdp(replicas=2, outer=OuterMode.shard))
    wanted = run(4, _at(hsdp, tmp_path, every=2), 4)
    folder = str(tmp_path / "iter_0000002")
    _assert_equal_runs(run(4, _at(hsdp, tmp_path, resume=folder), 4), wanted)
    split = run(2, _at(config(Topology(tp=2), None), tmp_path, resume=folder), 4)[0]
    torch.testing.assert_close(
        torch.tensor(split.losses), torch.tensor(wanted[0].losses[2:]), rtol=0, atol=5e-3
    )  # bf16 has 8 bits
    assert split.weights.keys() == wanted[0].weights.keys()


def test_megatrons_own_adamw_goes_on_and_over_shards(tmp_path: Path) -> None:
    """Its two chained optimizers become one over shards, and each parameter keeps its own step count."""
    adamw = AdamW(lr=5e-3)
    wanted = run(2, _at(_moe(EP2, optimizer=adamw), tmp_path, every=2), 4)
    folder = str(tmp_path / "iter_0000002")
    _assert_equal_runs(run(2, _at(_moe(EP2, optimizer=adamw), tmp_path, resume=folder), 4), wanted)
    shards = run(3, _at(_moe(Topology(), HpFsdp(), optimizer=adamw), tmp_path, resume=folder), 4)[0]
    torch.testing.assert_close(torch.tensor(shards.losses), torch.tensor(wanted[0].losses[2:]), rtol=2e-5, atol=0)
    _assert_close_weights(shards, wanted[0], most=1e-3)  # AdamW's step hangs on signs of gradients near zero
    with pytest.raises(RankError, match=r"the checkpoint has no momentum_buffer; it holds exp_avg, exp_avg_sq"):
        run(2, _at(_moe(EP2, optimizer=HpMuon()), tmp_path, resume=folder), 4)
    wide = train_config(moe(hidden_size=64), EP2, optimizer=adamw, steps=4, global_batch=12)
    with pytest.raises(RankError, match=r"model\.hidden_size is 32 there and 64 here"):
        run(2, _at(wide, tmp_path, resume=folder), 4)


@pytest.mark.once
def test_what_is_loaded_is_what_was_asked_for(tmp_path: Path) -> None:
    """Other padding of the vocabulary, weights alone, momentum that was a sum: values before any step."""

    def config(topology: Topology, optimizer: AdamW | HpMuon | None = None) -> Train:
        return train_config(dense(vocab_multiple=40), topology, optimizer=optimizer, steps=4)

    (saved,) = run(1, _at(config(Topology()), tmp_path, every=2), 2)
    folder = tmp_path / "iter_0000002"
    padded = run(2, _at(config(Topology(tp=2)), tmp_path, resume=str(folder)), 2)
    for name, weight in padded[0].weights.items():
        assert torch.equal(weight[: len(saved.weights[name])], saved.weights[name]), name
    words = "embedding.word_embeddings.weight"
    assert (len(saved.weights[words]), len(padded[0].weights[words])) == (120, 160)
    moments = torch.cat([rank.state[f"exp_avg/{words}"] for rank in padded])
    assert torch.equal(moments[:120], saved.state[f"exp_avg/{words}"])
    assert not moments[120:].any()
    assert padded[1].state[f"step/{words}"] == 2

    options = {"resume": str(folder), "load_optimizer": False, "load_position": False, "load_random": False}
    (fresh,) = run(1, _at(config(Topology(), AdamW()), tmp_path, **options), 0)
    assert fresh.begin == 0
    assert all(torch.equal(weight, saved.weights[name]) for name, weight in fresh.weights.items())
    assert not any(tensor.any() for tensor in fresh.state.values())

    manifest = read_manifest(folder)
    manifest.state.momentum = Momentum.sum
    (folder / MANIFEST).write_text(manifest_text(manifest))
    (averaged,) = run(1, _at(config(Topology()), tmp_path, resume=str(folder)), 2)
    momenta = [name for name in averaged.state if name.startswith("momentum_buffer/")]
    assert len(momenta) == 8
    for name in momenta:
        torch.testing.assert_close(averaged.state[name], saved.state[name] * (1 - HpMuon().momentum))
