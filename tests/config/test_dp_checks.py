"""Options of data parallelism that do not fit each other, the model or the ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hp_muon_plugin.config.checks import check_train
from hp_muon_plugin.config.choices import FloatDtype, MegatronSharding, MissingGrad, OuterMode
from hp_muon_plugin.config.data_parallel import DataParallel, DpOptions, HpFsdp, MegatronFsdp, TorchFsdp2
from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.config.train_options import load_train, save_train
from hp_muon_plugin.config.trainer import Checkpoint, Model, MoE, Monitor, Topology, Train
from hp_muon_plugin.errors import ConfigError

EP = Topology(ep=2)


def config(dp: DpOptions, topology: Topology | None = None, *, experts: bool = False) -> Train:
    train = Train(optimizer=HpMuon(), dp=dp, topology=topology or Topology())
    train.model.moe = MoE() if experts else None
    return train


@pytest.mark.parametrize(
    ("train", "option", "fix"),
    [
        (config(HpFsdp(replicas=3)), "dp.replicas", "choose among 1, 2, 4, 8"),
        (config(HpFsdp(replicas=8), EP, experts=True), "dp.replicas", "choose among 1, 2, 4"),
        (config(HpFsdp(outer=OuterMode.shard)), "dp.outer", "set dp.replicas=2 or more"),
        (config(HpFsdp(reduce_dtype=FloatDtype.float16)), "dp.reduce_dtype", "set dp.reduce_dtype=float32"),
        (config(HpFsdp(reshard_after_forward=3)), "dp.reshard_after_forward", "a divisor above 1"),
        (config(HpFsdp(reshard_after_forward=1)), "dp.reshard_after_forward", "a divisor above 1"),
        (config(HpFsdp(reshard_after_forward=8, replicas=2)), "dp.reshard_after_forward", "a divisor above 1"),
        (config(HpFsdp(reshard_after_forward=2), EP, experts=True), "dp.reshard_after_forward", "=true or false"),
        (config(HpFsdp(reshard_after_forward=-1)), "dp.reshard_after_forward", "dp.reshard_after_forward=True"),
        (config(HpFsdp(max_padding=1.0)), "dp.max_padding", "dp.max_padding=0.01"),
        (config(DataParallel(bucket_size=1)), "dp.bucket_size", "set dp.overlap_grad_reduce=true"),
    ],
)
def test_a_wrong_value_is_named_with_a_fix(train: Train, option: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_train(train, world_size=8)
    assert caught.value.option == option
    assert fix in caught.value.fix


def test_tied_embeddings_over_stages_need_gradients_on_every_replica() -> None:
    train = config(HpFsdp(replicas=2, outer=OuterMode.broadcast), Topology(pp=2))
    check_train(train, world_size=8)
    train.model.tie_embeddings = True
    with pytest.raises(ConfigError, match="set dp.outer=replicate"):
        check_train(train, world_size=8)


@pytest.mark.parametrize("dp", [TorchFsdp2(), MegatronFsdp()])
@pytest.mark.parametrize("option", ["every", "resume"])
def test_runs_of_peers_are_neither_saved_nor_resumed(dp: DpOptions, option: str) -> None:
    train = config(dp)
    train.optimizer = AdamW()
    check_train(train, world_size=2)
    train.checkpoint = Checkpoint(every=10) if option == "every" else Checkpoint(resume="auto")
    with pytest.raises(ConfigError, match=f"(?s)checkpoint.{option}=.*neither saved nor resumed.*dp=hp_fsdp"):
        check_train(train, world_size=2)


def test_a_missing_gradient_cannot_be_an_error() -> None:
    train = config(HpFsdp())
    train.optimizer = HpMuon(missing_grad=MissingGrad.error)
    with pytest.raises(ConfigError, match="optimizer.missing_grad=leave"):
        check_train(train, world_size=8)


@pytest.mark.parametrize(
    "dp",
    [
        HpFsdp(),
        HpFsdp(reshard_after_forward=True),
        HpFsdp(reshard_after_forward=False, prefetch=0),
        HpFsdp(reshard_after_forward=2, replicas=2, outer=OuterMode.shard),
        TorchFsdp2(reshard_after_forward=False),
        MegatronFsdp(sharding=MegatronSharding.optim_grads, overlap=False),
    ],
)
def test_options_that_fit_are_accepted_and_survive_a_file(dp: DpOptions, tmp_path: Path) -> None:
    train = replace(config(replace(dp)), optimizer=AdamW())
    check_train(train, world_size=8)
    save_train(train, tmp_path / "config.yaml")
    loaded = load_train(tmp_path / "config.yaml").dp
    assert loaded == dp
    if isinstance(dp, HpFsdp):
        assert type(loaded.reshard_after_forward) is type(dp.reshard_after_forward)  # True == 1


PEERS = [
    (TorchFsdp2(), {"topology": EP}, "topology.ep=2", "take dp=hp_fsdp"),
    (TorchFsdp2(), {"topology": Topology(pp=2)}, "topology.pp=2", "set topology.pp=1"),
    (TorchFsdp2(), {"model": Model(tie_embeddings=True)}, "model.tie_embeddings", "tie_embeddings=false"),
    (TorchFsdp2(), {"optimizer": HpMuon(missing_grad=MissingGrad.error)}, "optimizer.missing_grad", "=leave"),
    (TorchFsdp2(), {"optimizer": HpMuon(qk_clip=100.0)}, "optimizer.qk_clip", "qk_clip=null"),
    (MegatronFsdp(), {"optimizer": HpMuon()}, "optimizer=hp_muon", "set optimizer=adamw"),
    (MegatronFsdp(replicas=2), {}, "dp.replicas=2", "take dp=hp_hsdp dp.replicas=2"),
    (MegatronFsdp(sharding=MegatronSharding.optim), {}, "dp.sharding=optim", "optim_grads_params"),
    (MegatronFsdp(), {"topology": Topology(pp=2)}, "topology.pp=2", "set topology.pp=1"),
    (MegatronFsdp(), {"monitor": Monitor(interval=5)}, "monitor.interval=5", "monitor.interval=0"),
]


@pytest.mark.parametrize(("dp", "changes", "option", "fix"), PEERS, ids=[f"{p[0].name}-{p[2]}" for p in PEERS])
def test_what_the_other_wrappers_would_train_wrong_is_refused(
    dp: DpOptions, changes: dict[str, Any], option: str, fix: str
) -> None:
    train = replace(Train(optimizer=AdamW(), dp=dp), **changes)
    train.model.moe = MoE() if train.topology.ep > 1 else None
    with pytest.raises(ConfigError) as caught:
        check_train(train, world_size=4)
    assert str(caught.value).startswith(option)
    assert fix in str(caught.value)
