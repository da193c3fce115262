"""Runs of megatron-core's own code that go on at other sizes of tensor, pipeline and expert parallelism.

megatron-core trains and saves on one mesh; what conversions make of that it loads on another, where its own files do
not load. What it has loaded it saves again, and that is read as the same tensors and steps, to the bit. Losses of the
next steps are those of the run that was not stopped, up to the order of sums. HP_MUON_ALL_PAIRS=1 takes more pairs.
"""

import os
from pathlib import Path

import pytest
import torch
from dist_pool import run_ranks

from hp_muon_plugin.checkpoint.formats import open_checkpoint
from hp_muon_plugin.errors import HookError
from hp_muon_plugin.megatron.versions import core_version
from hp_muon_plugin.train.setup import Launch
from lane.combos import features
from lane.upstream_files import converted
from lane.upstream_mesh import Mesh
from lane.upstream_parallel import Parallel
from tests.checkpoint.fixtures import differences

BEFORE, AFTER = 2, 2


def _mesh(text: str) -> Mesh:
    return Mesh(features(text), layers=2)


PAIRS = {"pp2-ep1-tp1 to pp1-ep2-tp2": (_mesh("pp moe"), 2, _mesh("tp sp ep"), 2)}
ALL = bool(os.environ.get("HP_MUON_ALL_PAIRS"))
if ALL:
    PAIRS |= {
        "pp2-ep2 to tp2-ep4": (_mesh("pp ep"), 4, _mesh("tp sp ep4"), 4),
        "ep2 to ep1": (_mesh("ep"), 2, _mesh("moe"), 2),
        "ep2 to ep4": (_mesh("ep"), 2, _mesh("ep4"), 4),
        "ep1 to ep2": (_mesh("moe"), 4, _mesh("ep"), 2),
        "tp1 to tp2": (_mesh(""), 2, _mesh("tp"), 2),
        "tp2 to tp1": (_mesh("tp"), 4, _mesh(""), 4),
        "pp2 to pp1": (_mesh("pp"), 2, _mesh(""), 2),
        "pp1 to pp2": (_mesh(""), 2, _mesh("pp"), 4),
        "tp2-pp2 to dp4": (_mesh("tp sp pp"), 4, _mesh(""), 4),
        "pp2-mtp to tp2": (_mesh("pp mtp"), 2, _mesh("tp mtp"), 2),
        "vpp2 to pp1": (Mesh(features("pp vpp")), 2, Mesh(features("")), 2),
    }


def _forms() -> list[str]:
    """Forms that the installed version loads, of those that we write."""
    try:
        is_old = core_version().lane < (0, 14)
    except HookError:
        return []
    return ["legacy"] if is_old else ["legacy", "dp_reshardable", "fully_reshardable"] if ALL else ["dp_reshardable"]


def _saved(launch: Launch, mesh: Mesh, folder: Path) -> list[float]:
    """Train and save; losses of the steps after that."""
    run = Parallel(launch, mesh)
    run.train(BEFORE)
    run.save(folder, _forms()[-1])
    return run.train(AFTER, BEFORE)


def _loaded(launch: Launch, mesh: Mesh, folder: Path, forms: list[str]) -> list[list[float]]:
    """Load each form, save it again, and train on."""
    run, losses = Parallel(launch, mesh), []
    run.train(1)  # makes state, which is spoilt
    for form in forms:
        run.spoil()
        run.load(folder / form, form)
        run.save(folder / f"{form} again", "legacy")
        losses.append(run.train(AFTER, BEFORE))
    return losses


@pytest.mark.slow  # runs of Megatron on two meshes
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", PAIRS)
def test_megatron_goes_on_at_other_sizes(name: str, tmp_path: Path) -> None:
    mesh, ranks, other, other_ranks = PAIRS[name]
    wanted = run_ranks(ranks, _saved, mesh, tmp_path / "saved", timeout_s=100.0)[-1]
    for form in _forms():
        to, sharding = ("torch", "distributed") if form == "legacy" else ("torch_dist", form)
        converted(tmp_path / "saved", tmp_path / form, other, to, sharding)
    losses = run_ranks(other_ranks, _loaded, other, tmp_path, _forms(), timeout_s=100.0)[-1]
    source = open_checkpoint(tmp_path / "saved")
    for form, found in zip(_forms(), losses, strict=True):
        again = open_checkpoint(tmp_path / f"{form} again")
        assert differences(source, again) == [], form
        assert again.state().steps == source.state().steps, form
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3)
