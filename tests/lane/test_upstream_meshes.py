"""Checkpoints of megatron-core on tensor, pipeline and virtual stages: read, converted, and loaded by it again.

megatron-core trains and saves in each of its forms; all are read as the same tensors, bit for bit, of which one form
names every parameter. What conversions make of them it loads into a spoilt model: what each rank holds is what the run
held, and so are losses and all of that after one more step. HP_MUON_ALL_PAIRS=1 takes more meshes.
"""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dist_pool import run_ranks

from hp_muon_plugin.checkpoint import convert
from hp_muon_plugin.checkpoint.canonical import Target
from hp_muon_plugin.checkpoint.formats import open_checkpoint
from hp_muon_plugin.errors import HookError
from hp_muon_plugin.megatron.versions import core_version
from hp_muon_plugin.train.setup import Launch
from lane.combos import features
from lane.upstream_parallel import Mesh, Parallel

MESHES = {"pp2-vpp2-uneven-mtp-ep2": (Mesh(features("pp vpp ep mtp"), first=4, layers=6), 4)}
ONCE = {"tp2-pp2-tied-uneven": (Mesh(features("tp sp pp"), tied=True, first=3), 4)}
if os.environ.get("HP_MUON_ALL_PAIRS"):
    MESHES |= {
        "tp2-ep2-etp1": (Mesh(features("tp sp ep")), 4),
        "tp2-etp2": (Mesh(features("tp sp etp")), 4),
        "pp2-buckets": (Mesh(features("pp"), bucket_size=6000), 2),
        "pp2-mtp": (Mesh(features("pp mtp")), 2),
    }
NAMED = "fully_reshardable"


def _is_old() -> bool:
    """Whether it is a version before ``dp_reshardable``, which loads nothing of ours but the legacy format."""
    try:
        return core_version().lane < (0, 14)
    except HookError:
        return False


def _converted(source: Path, target: Path, mesh: Mesh, to: str, sharding: str) -> None:
    sizes = mesh.sizes
    wanted = Target(sizes.tp, sizes.pp, sizes.ep, sharding=sharding)
    found = convert.plan(open_checkpoint(source), to, wanted)
    assert all("random state" in line for line in found.losses), found.losses
    convert.convert(found, target, drop=True)
    found.source.close()


def _unequal(folder: Path, forms: list[str]) -> list[str]:
    """Tensors and values that are not the same in all forms."""
    first, *others = (open_checkpoint(folder / form) for form in forms)
    found = []
    for other in others:
        found += [f"{other.path}: {key}" for key in first.tensors().keys() ^ other.tensors().keys()]
        found += [
            f"{other.path}: {key}"
            for key in first.tensors().keys() & other.tensors().keys()
            if not torch.equal(first.read(key), other.read(key))
        ]
        same = first.state().steps == other.state().steps and first.state().hyper == other.state().hyper
        found += [] if same else [f"{other.path}: steps or values of groups"]
    return found


def _there_and_back(launch: Launch, mesh: Mesh, folder: Path) -> list[str]:
    """What was not as it had been on this rank."""
    run = Parallel(launch, mesh)
    run.train(2)
    had = run.held()
    named = "fully_sharded_model_space" if _is_old() else NAMED
    forms = [named, "dp_zero_gather_scatter", "legacy", *([] if _is_old() else ["dp_reshardable"])]
    for form in forms:
        run.save(folder / form, form)
    losses, later = run.train(1, 2), run.held()
    routes = [("dp_zero_gather_scatter", "torch", "distributed")]
    if not _is_old():
        routes = [("dp_reshardable", "torch", "distributed"), ("legacy", "torch_dist", "dp_reshardable")]
    wrong: list[str] = []
    if launch.rank == 0:
        skipped = [named] if mesh.bucket_size and not _is_old() else []  # that is the form that upstream writes corrupt
        wrong += _unequal(folder, [form for form in forms if form not in skipped])
        for source, to, sharding in routes:
            _converted(folder / source, folder / f"{source}-{sharding}", mesh, to, sharding)
    dist.barrier()
    for source, to, sharding in routes:
        run.spoil()
        run.load(folder / f"{source}-{sharding}", "legacy" if to == "torch" else sharding)
        wrong += [] if run.held() == had else [f"{source} to {sharding}: as loaded"]
        wrong += [] if run.train(1, 2) == losses else [f"{source} to {sharding}: losses"]
        wrong += [] if run.held() == later else [f"{source} to {sharding}: a step later"]
    return wrong


@pytest.mark.slow  # a run of Megatron on four ranks, four saves, two conversions and two loads
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", [*MESHES, *(pytest.param(name, marks=pytest.mark.once) for name in ONCE)])
def test_every_form_is_read_and_what_is_written_is_loaded(name: str, tmp_path: Path) -> None:
    mesh, ranks = (MESHES | ONCE)[name]
    for wrong in run_ranks(ranks, _there_and_back, mesh, tmp_path, timeout_s=200.0):
        assert wrong == []
