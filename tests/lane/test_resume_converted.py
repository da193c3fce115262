"""Runs of megatron-core's own code, converted, and gone on with by our trainer under either wrapper."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dist_pool import run_ranks

from hp_muon_plugin.checkpoint import convert
from hp_muon_plugin.checkpoint.canonical import Source, Target
from hp_muon_plugin.checkpoint.formats import open_checkpoint
from hp_muon_plugin.config.choices import Decay, Precision
from hp_muon_plugin.config.data_parallel import DpOptions
from hp_muon_plugin.config.optimizer import AdamW
from hp_muon_plugin.config.trainer import Checkpoint, LrSchedule, Topology, Train
from hp_muon_plugin.errors import HookError
from hp_muon_plugin.megatron.versions import core_version
from hp_muon_plugin.train.setup import Launch
from lane.any_fixture import described, folder_of, lane
from lane.combos import features, model_options
from lane.harness import batches, build, train_config, whole_weights
from lane.our_runs import WAYS, options, resumed, upstream
from lane.upstream_mesh import Mesh
from lane.upstream_parallel import BATCH, Parallel
from lane.upstream_runs import STEPS, Load
from tests.checkpoint.fixtures import CORRUPT, differences
from tests.checkpoint.others import fixtures

BEFORE = 2
MESH = Mesh(features("ep"), layers=2)


def _form() -> str:
    """A form of files that the installed version writes."""
    try:
        return "legacy" if core_version().lane < (0, 14) else "dp_reshardable"
    except HookError:
        return "legacy"


def _megatron(launch: Launch, folder: Path) -> list[float]:
    """Train and save; losses of the steps after that."""
    run = Parallel(launch, MESH)
    run.train(BEFORE)
    run.save(folder, _form())
    return run.train(STEPS, BEFORE)


def _config(topology: Topology, dp: DpOptions, resume: Path, save: Path) -> Train:
    """The run of upstream_parallel.py in our trainer's options."""
    model = model_options(MESH.features)
    model.num_layers = MESH.layers
    config = train_config(
        model, topology, optimizer=AdamW(lr=3e-3), precision=Precision.bf16, steps=9, dp=dp, global_batch=BATCH
    )
    return replace(
        config,
        lr_schedule=LrSchedule(warmup_steps=0, decay=Decay.constant),
        checkpoint=Checkpoint(resume=str(resume), save=str(save)),
    )


def _resumed(launch: Launch, config: Train) -> tuple[int, int, dict[str, torch.Tensor], list[float]]:
    """Go on, saving at once what was loaded: step, place in the schedule, whole weights, losses of the steps after."""
    from hp_muon_plugin.train.checkpoint_fit import check_fit
    from hp_muon_plugin.train.checkpoints import Checkpoints

    check_fit(config, Path(str(config.checkpoint.resume)))
    ready = build(launch, config)
    checkpoints = Checkpoints(
        config, Path("unused"), ready.model, ready.optimizer, ready.schedule, data=None, device=torch.device("cpu")
    )
    progress = checkpoints.resume()
    checkpoints.save(progress)
    checkpoints._saver.wait()
    weights, place = whole_weights(ready), ready.schedule.num_steps
    stream = batches(config, ready.trainer._dp_rank, ready.trainer._dp_size, first_step=progress.step)
    losses = [ready.trainer._step(stream)[0] for _ in range(STEPS)]
    return progress.step, place, weights, losses


@pytest.mark.slow  # three runs of two ranks
@pytest.mark.timeout(180)
def test_a_run_of_megatron_goes_on_in_our_trainer(tmp_path: Path) -> None:
    """What was loaded is saved before any step: all tensors and steps are the run's. So are the losses after it."""
    (losses, _) = run_ranks(2, _megatron, tmp_path / "theirs")
    source = open_checkpoint(tmp_path / "theirs")
    found = convert.plan(source, "hp", Target())
    assert all("random state" in line for line in found.losses), found.losses
    convert.convert(found, tmp_path / "ours", drop=bool(found.losses))
    for name, dp in WAYS.items():
        config = _config(Topology(ep=2 if dp is None else 1), dp, tmp_path / "ours", tmp_path / name)
        ((step, place, weights, found_losses), _) = run_ranks(2, _resumed, config)
        assert (step, place) == (BEFORE, BEFORE), name
        again = open_checkpoint(tmp_path / name)
        assert differences(source, again) == [], name
        assert again.state().steps == source.state().steps, name
        for key, tensor in _weights(source):
            assert torch.equal(weights[key].bfloat16(), tensor), (name, key)
        torch.testing.assert_close(found_losses, losses, rtol=0, atol=1e-4)  # bf16, sums in another order


def _weights(source: Source) -> Iterator[tuple[str, torch.Tensor]]:
    for key in source.tensors():
        if key.kind == "weight":
            yield key.name, source.read(key)


LANE = lane()
CARRIED = {"mcore012": "moehet_ep2_dp2_fsms", "mcore016": "moe_ep2_dp2_dpr", "mcore019": "muon_lwl_dense_dp2_dpr"}
OWN = [f"{LANE}/{CARRIED[LANE]}"]
OTHERS: list[str] = []
if os.environ.get("HP_MUON_ALL_PAIRS"):
    every = [name for name in fixtures("*/*") if name.replace("/", "_") != CORRUPT]
    OWN = [name for name in every if name.startswith(f"{LANE}/")] or OWN
    OTHERS = [name for name in every if not name.startswith(f"{LANE}/")]


@pytest.mark.slow  # a conversion and three runs of two ranks
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", [*OWN, *(pytest.param(name, marks=pytest.mark.once) for name in OTHERS)])
def test_a_fixture_goes_on_in_our_trainer(name: str, tmp_path: Path) -> None:
    """Its schedule counts samples and ours steps. Losses are Megatron's, where its version is the installed one."""
    folder = folder_of(name, tmp_path)
    source = open_checkpoint(folder / "ckpt")
    body = described(source, folder)
    found = convert.plan(source, "hp", Target())
    assert all("random state" in line for line in found.losses), found.losses
    convert.convert(found, tmp_path / "ours", drop=bool(found.losses))
    losses: list[float] = []
    if name in OWN:
        load = Load(folder / "ckpt", body["format"] == "torch", random=False)
        losses = run_ranks(body["world_size"], upstream, body, load)[0]
    for way in WAYS:
        config = options(body, way, tmp_path / "ours", tmp_path / way)
        (step, place, samples, rate, warnings), ours = run_ranks(body["world_size"], resumed, body, config)[0]
        assert (step, place, samples) == (3, 3, source.state().consumed_samples or 0), way
        assert any("how many samples" in line for line in warnings) == (source.state().consumed_samples is None)
        assert rate == pytest.approx(source.state().hyper["decoder.final_layernorm.weight"]["lr"]), way
        again = open_checkpoint(tmp_path / way)
        assert differences(source, again) == [], way
        assert again.state().steps == source.state().steps, way
        losses = losses or ours
        assert ours[0] == pytest.approx(losses[0], abs=1e-6), way
        same = 1 if body["optimizer"] == "muon" else STEPS  # of Megatron's Muon ours has another scale
        # bf16, sums in another order: 4e-4 where a token's router changed its mind
        torch.testing.assert_close(ours[:same], losses[:same], rtol=0, atol=1e-3)
