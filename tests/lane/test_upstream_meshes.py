"""Checkpoints of megatron-core on tensor, pipeline and virtual stages: read, converted, and loaded by it again.

megatron-core trains and saves in each of its forms; all are read as the same tensors, bit for bit, of which one form
names every parameter. What conversions make of them it loads into a spoilt model: what each rank holds is what the run
held, and so are losses and all of that after one more step. HP_MUON_ALL_PAIRS=1 takes more meshes.
"""

import os
from pathlib import Path

import pytest
import torch.distributed as dist
from dist_pool import run_ranks

from hp_muon_plugin.errors import HookError
from hp_muon_plugin.megatron.versions import core_version
from hp_muon_plugin.train.setup import Launch
from lane.combos import features
from lane.upstream_files import converted, differing, unequal
from lane.upstream_mesh import Mesh
from lane.upstream_parallel import Parallel

MESHES = {"pp2-vpp2-uneven-mtp-ep2": (Mesh(features("pp vpp ep mtp"), first=4, layers=6), 4)}
IDLE = Mesh(features("pp mtp"), tied=True)
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


if not _is_old():  # 0.12 has no such layouts
    MESHES["pp3-mtp-alone-tied"] = (Mesh(features("pp mtp"), tied=True, layout="Ett|ttm|L"), 3)


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
        wrong += unequal(folder, [form for form in forms if form not in skipped])
        for source, to, sharding in routes:
            converted(folder / source, folder / f"{source}-{sharding}", mesh, to, sharding)
    dist.barrier()
    for source, to, sharding in routes:
        form = "legacy" if to == "torch" else sharding
        found = run.unlike(folder / f"{source}-{sharding}", form, had, losses, later)
        wrong += [f"{source} to {sharding}: {what}" for what in found]
    return wrong


@pytest.mark.slow  # a run of Megatron on four ranks, four saves, two conversions and two loads
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", [*MESHES, *(pytest.param(name, marks=pytest.mark.once) for name in ONCE)])
def test_every_form_is_read_and_what_is_written_is_loaded(name: str, tmp_path: Path) -> None:
    mesh, ranks = (MESHES | ONCE)[name]
    for wrong in run_ranks(ranks, _there_and_back, mesh, tmp_path, timeout_s=200.0):
        assert wrong == []


def _beside_prediction(launch: Launch, folder: Path) -> tuple[str, list[list[str]], bool]:
    """What megatron-core says to sharded keys, what differed as loaded and a step later, whether losses were same."""
    run = Parallel(launch, IDLE)
    refusal = run.refusal()
    run.train(2)
    had = run.held()
    run.save(folder / "legacy", "legacy")
    losses, later = run.train(1, 2), run.held()
    if launch.rank == 0:
        converted(folder / "legacy", folder / "hp", IDLE, "hp", None)
        converted(folder / "hp", folder / "back", IDLE, "torch", "distributed")
    dist.barrier()
    run.spoil()
    run.load(folder / "back", "legacy")
    wrong = [differing(had, run.held())]
    same = run.train(1, 2) == losses
    return refusal, [*wrong, differing(later, run.held())], same


@pytest.mark.timeout(120)
def test_an_idle_output_layer_beside_multi_token_prediction(tmp_path: Path) -> None:
    """On the last of several stages the copy of the embedding is the tied output layer, and that one has no use.

    megatron-core saves it in legacy files alone. Ours is a copy of the embedding, and training does not depend on it.
    """
    first, last = run_ranks(2, _beside_prediction, tmp_path, timeout_s=100.0)
    assert first == ("", [[], []], True)
    refusal, wrong, same = last
    assert refusal.startswith("AssertionError")
    assert same
    assert wrong == [["output_layer.weight", "state"]] * 2
