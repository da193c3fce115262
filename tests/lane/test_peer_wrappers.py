"""The wrappers that ours is compared with, under the same trainer: equal losses and norms, or refused by name.

megatron-core's own DistributedDataParallel is the reference. Seen: 1e-7 of a loss after 3 steps.
"""

from typing import Any

import pytest
import torch
from dist_pool import run_ranks
from made_once import computed_once

from hp_muon_plugin.cli.plan_text import plan_text
from hp_muon_plugin.config.choices import MegatronSharding, OuterMode, Precision
from hp_muon_plugin.config.data_parallel import DpOptions, HpFsdp, MegatronFsdp, TorchFsdp2
from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.config.trainer import Topology
from hp_muon_plugin.errors import ConfigError, ConfigErrors
from hp_muon_plugin.megatron.lane_checks import check_lane, lane_errors
from hp_muon_plugin.megatron.versions import core_version
from hp_muon_plugin.train.setup import Launch
from lane.harness import build, dense, moe, train, train_config

STEPS = 3
MODELS = {"dense": dense, "moe": moe}
SP, EP = Topology(tp=2, sequence_parallel=True), Topology(ep=2)
OPTIMIZERS = {"hp_muon": HpMuon(), "adamw": AdamW()}
LANE = core_version().lane


def _run(launch: Launch, model: str, topology: Topology, dp: DpOptions | None, optimizer: str, precision: str) -> Any:
    config = train_config(
        MODELS[model](),
        topology,
        dp=dp,
        optimizer=OPTIMIZERS[optimizer],
        global_batch=8,
        precision=Precision(precision),
    )
    config.monitor.interval = 0 if isinstance(dp, MegatronFsdp) else 1
    ready = build(launch, config)
    ready.trainer._monitor.begin(1)
    train(ready, STEPS)
    measured = ready.trainer._measured
    return ready.losses, ready.norms, {name: value for name, value in measured.items() if name.startswith("rms/")}


@computed_once
def reference(model: str, optimizer: str) -> Any:
    return run_ranks(2, _run, model, Topology(), None, optimizer, "fp32")[0]


CASES = [
    ("dense", 2, Topology(), TorchFsdp2(), "hp_muon"),
    ("dense", 4, SP, TorchFsdp2(), "hp_muon"),
    ("moe", 4, Topology(), TorchFsdp2(), "hp_muon"),
    ("moe", 2, Topology(), TorchFsdp2(), "adamw"),
    ("dense", 4, Topology(), HpFsdp(replicas=2, outer=OuterMode.shard), "adamw"),
]
if LANE >= (0, 16):
    CASES += [
        ("dense", 2, Topology(), MegatronFsdp(), "adamw"),
        ("moe", 4, EP, MegatronFsdp(sharding=MegatronSharding.optim_grads, overlap=False), "adamw"),
    ]


def _id(case: Any) -> str:
    model, ranks, topology, dp, optimizer = case
    return f"{model}-ranks{ranks}-tp{topology.tp}-ep{topology.ep}-{dp.name}-{optimizer}"


@pytest.mark.parametrize("case", CASES, ids=_id)
def test_losses_and_norms_are_those_of_megatrons_wrapper(case: Any) -> None:
    model, ranks, topology, dp, optimizer = case
    losses, norms, _ = reference(model, optimizer)
    found = run_ranks(ranks, _run, model, topology, dp, optimizer, "fp32")
    for got in found:
        assert got[0] == pytest.approx(losses, rel=1e-6)
        assert got[1] == pytest.approx(norms, rel=1e-5)
    assert losses[0] != losses[1]


def test_measurements_over_dtensors_are_those_over_whole_weights() -> None:
    """A chunk knows which part of its weight it is."""
    _, _, wanted = reference("moe", "hp_muon")
    _, _, found = run_ranks(4, _run, "moe", Topology(), TorchFsdp2(), "hp_muon", "fp32")[0]
    assert set(found) == set(wanted)
    assert found == pytest.approx(wanted, rel=1e-4)


def test_bf16_over_dtensors_keeps_float32_masters() -> None:
    """Updates far below the spacing of bf16 add up; gradients are reduced in bf16 there, so losses are near only."""
    wanted = run_ranks(2, _run, "dense", Topology(), None, "hp_muon", "bf16")[0]
    found = run_ranks(2, _run, "dense", Topology(), TorchFsdp2(), "hp_muon", "bf16")[0]
    assert found[0] == pytest.approx(wanted[0], abs=2e-3)
    assert found[1] == pytest.approx(wanted[1], rel=2e-2)


def _wrong(topology: Topology, dp: DpOptions) -> Any:
    return train_config(moe() if topology.ep > 1 else dense(), topology, dp=dp, optimizer=AdamW())


def test_what_this_version_cannot_do_is_refused() -> None:
    cases = [
        (Topology(), MegatronFsdp(), LANE < (0, 16), "counts a micro-batch's gradients twice"),
        (SP, MegatronFsdp(), (0, 16) <= LANE < (0, 19), "fails without it"),
        (Topology(), TorchFsdp2(reshard_after_forward=False), LANE < (0, 16), "no such option"),
    ]
    for topology, dp, is_wrong, why in cases:
        config = _wrong(topology, dp)
        assert bool(lane_errors(config)) == is_wrong or LANE < (0, 16)
        assert ("REFUSED by a run" in plan_text(config, 4)) == bool(lane_errors(config))
        if is_wrong:
            with pytest.raises((ConfigError, ConfigErrors), match=why):
                check_lane(config)


def _failing(launch: Launch, topology: Topology, dp: DpOptions) -> str:
    """What happens without the refusal: upstream's error, or a wrong norm."""
    try:
        ready = train(build(launch, _wrong(topology, dp)), 1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"norm {ready.norms[0]:.4f}"


@pytest.mark.parametrize(
    ("topology", "dp", "first", "last", "error"),
    [
        (Topology(pp=2), MegatronFsdp(), (0, 16), (0, 19), "EinopsError"),
        (SP, MegatronFsdp(), (0, 16), (0, 16), "TypeError: isinstance() arg 2"),
        (Topology(), MegatronFsdp(), (0, 12), (0, 12), "norm"),
        (Topology(), MegatronFsdp(sharding=MegatronSharding.optim), (0, 16), (0, 16), "norm"),
        (Topology(), MegatronFsdp(sharding=MegatronSharding.optim, overlap=False), (0, 19), (0, 19), "norm"),
    ],
    ids=["pp", "tp-without-te", "custom-fsdp", "optim", "optim-no-overlap"],
)
def test_the_refusals_are_still_needed(
    topology: Topology, dp: DpOptions, first: tuple[int, int], last: tuple[int, int], error: str
) -> None:
    """Says when megatron-core is repaired."""
    if not first <= LANE <= last:
        pytest.skip(f"of megatron-core {first} to {last}")
    found = run_ranks(4 if topology.tp * topology.pp > 1 else 2, _failing, topology, dp)[0]
    assert error in found
    if error == "norm":
        right = run_ranks(2, _failing, topology, None)[0]
        assert abs(float(found[5:]) - float(right[5:])) > 0.05, found


def _mixed(launch: Launch) -> float:
    """Two ranks hold different experts; fully_shard over all of them takes these for copies of one weight."""
    config = train_config(moe(), EP, dp=TorchFsdp2(), optimizer=AdamW())
    model: Any = build(launch, config).model
    name, expert = next((n, p) for n, p in model.named_parameters() if "local_experts" in n)
    whole: torch.Tensor = expert.full_tensor()
    return float(whole.detach().double().sum()) if name else 0.0


def test_fully_shard_over_experts_of_different_ranks_mixes_them() -> None:
    """Why topology.ep > 1 is refused: the weight that ranks gather is half of one expert and half of another."""
    mixed = run_ranks(2, _mixed)
    assert mixed[0] == mixed[1]
