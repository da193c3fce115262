"""Runs that go on from our own checkpoints where Megatron has more than data, tensor and expert ranks.

Expert-tensor ranks, context-parallel ranks, multi-token prediction, virtual stages, QK-clip: bit for bit on the same
mesh, in a new model that a step had changed, and on another mesh up to the order of sums.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_pool import run_ranks

from hp_muon_plugin.checkpoint.manifest import read_manifest
from hp_muon_plugin.config.choices import OuterMode
from hp_muon_plugin.config.data_parallel import DpOptions, HpFsdp
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.megatron.versions import core_version
from hp_muon_plugin.train.setup import Launch
from lane import combos
from lane.upstream_runs import sha256

SAVED, STOP = 2, 4
HSDP = HpFsdp(replicas=2, outer=OuterMode.shard)
# 0.12 trains otherwise where context parallelism meets experts or multi-token prediction.
MORE = "" if core_version().lane < (0, 16) else " moe mtp"


def _config(launch: Launch, text: str, dp: DpOptions | None, qk_clip: float | None) -> tuple[combos.Features, Train]:
    chosen = combos.features(text)
    muon = HpMuon(lr=3e-3, weight_decay=0.1, qk_clip=qk_clip)
    return chosen, replace(combos.joined(launch, chosen), dp=dp, optimizer=muon)


def _held(models: list[Any], optimizer: Any) -> dict[str, str]:
    """Hashes of all that this rank has."""
    from hp_muon_plugin.megatron.held import held_params

    found = {}
    for held in held_params(models, optimizer):
        kinds = {**(held.state or {}), "weight": held.weight, "main": held.main}
        found |= {f"{kind}/{held.name}": sha256(tensor) for kind, tensor in kinds.items() if tensor is not None}
    return found


def _loaded(models: list[Any], optimizer: Any, folder: Path) -> None:
    from hp_muon_plugin.megatron.checkpoints import Team, load_run, open_latest, restore_random

    team = Team()
    found = open_latest(folder, team)
    assert found is not None
    restore_random(load_run(found, models, optimizer, team), team.rank, models)


def _there_and_again(launch: Launch, text: str, dp: DpOptions | None, qk_clip: float | None, folder: Path) -> Any:
    """Two steps, saved, and two more; the same two in another model of the same mesh."""
    from hp_muon_plugin.megatron.checkpoints import RunState, Saver, Team, save_run

    chosen, config = _config(launch, text, dp, qk_clip)
    models, optimizer = combos.built(chosen, config)
    combos.train_steps(models, optimizer, config, chosen, steps=SAVED)
    save_run(Saver(folder, Team()), SAVED, models, optimizer, RunState(iteration=SAVED))
    rest = {"steps": STOP - SAVED, "first_step": SAVED}
    straight = combos.train_steps(models, optimizer, config, chosen, **rest), _held(models, optimizer)
    again, another = combos.built(chosen, config)
    combos.train_steps(again, another, config, chosen, steps=1)
    _loaded(again, another, folder)
    resumed = combos.train_steps(again, another, config, chosen, **rest), _held(again, another)
    clip = getattr(optimizer, "qk_clip", None)
    return straight, resumed, None if clip is None else clip.largest_last


def _moved(launch: Launch, text: str, dp: DpOptions | None, qk_clip: float | None, folder: Path) -> combos.Curves:
    chosen, config = _config(launch, text, dp, qk_clip)
    models, optimizer = combos.built(chosen, config)
    _loaded(models, optimizer, folder)
    return combos.train_steps(models, optimizer, config, chosen, steps=STOP - SAVED, first_step=SAVED)


@pytest.mark.slow  # a run of four ranks, and one of two
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("text", "dp", "qk_clip", "other", "other_dp"),
    [
        pytest.param("tp sp etp", HSDP, 0.01, "ep", None, id="etp-qk-clip", marks=pytest.mark.once),
        pytest.param(f"cp pp vpp{MORE}", HpFsdp(), None, f"pp{MORE}", None, id="cp-vpp-mtp"),
    ],
)
def test_goes_on_bit_for_bit_and_on_another_mesh(
    text: str, dp: DpOptions | None, qk_clip: float | None, other: str, other_dp: DpOptions | None, tmp_path: Path
) -> None:
    ranks = run_ranks(4, _there_and_again, text, dp, qk_clip, tmp_path, timeout_s=120.0)
    for straight, resumed, largest in ranks:
        assert straight == resumed
        assert qk_clip is None or bool((largest > qk_clip).any())  # it had something to do
    saved = read_manifest(tmp_path / f"iter_{SAVED:07d}").tensors
    assert any(".mtp." in f".{name.partition('/')[2]}" for name in saved) == ("mtp" in text)
    assert not any("mtp_model_layer" in name for name in saved)  # what 0.19 calls it is no name of a checkpoint
    (losses, norms), _ = ranks[0][0]
    for moved in run_ranks(2, _moved, other, other_dp, qk_clip, tmp_path, timeout_s=60.0):
        torch.testing.assert_close(torch.tensor(moved[0]), torch.tensor(losses), rtol=2e-5, atol=0)
        torch.testing.assert_close(torch.tensor(moved[1]), torch.tensor(norms), rtol=2e-3, atol=0)
