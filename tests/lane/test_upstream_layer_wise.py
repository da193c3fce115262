"""Legacy checkpoints of megatron-core's layer-wise Muon: read, written, and trained on by it with the same bits.

Its ``dist_muon`` without buffer layout deals parameters to data-parallel ranks, each of which saves a file of its own.
megatron-core trains and saves that and ``torch_dist``, which names every parameter; both are read as the same tensors.
What conversions make of either it loads into a spoilt model: what each rank holds is what the run held, and so are the
losses and all of that after one more step. 0.12 has no such optimizer. HP_MUON_ALL_PAIRS=1 takes more meshes.
"""

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from dist_pool import run_ranks

from hp_muon_plugin.errors import HookError
from hp_muon_plugin.megatron.versions import core_version
from hp_muon_plugin.train.setup import Launch
from lane.combos import features
from lane.upstream_files import converted, unequal
from lane.upstream_layer_wise import LayerWise
from lane.upstream_mesh import Mesh
from lane.upstream_runs import Load, Run, arguments
from tests.checkpoint.fixtures import truth, unpacked


def _is_before(minor: int) -> bool:
    try:
        return core_version().lane < (0, minor)
    except HookError:
        return False


MESHES = {"ep2-edp2": (Mesh(features("ep")), 4)}
if os.environ.get("HP_MUON_ALL_PAIRS"):
    MESHES |= {
        "dp1": (Mesh(features("")), 1),
        "dp3": (Mesh(features("")), 3),
        "tp2-pp2-tied-uneven": (Mesh(features("tp sp pp"), tied=True, first=3), 4),
        "tp2-dp2": (Mesh(features("tp sp")), 4),
        "tp2-ep2-etp1": (Mesh(features("tp sp ep")), 4),
        "pp2-vpp2-ep2": (Mesh(features("pp vpp ep")), 4),
    }
    if not _is_before(19):  # whose Muon updates one copy of the embedding, and AdamW the other
        MESHES["pp2-mtp"] = (Mesh(features("pp mtp")), 4)


without_any = pytest.mark.skipif(_is_before(16), reason="megatron-core has the layer-wise optimizer since 0.16")


def _there_and_back(launch: Launch, mesh: Mesh, folder: Path) -> list[str]:
    """What was not as it had been on this rank."""
    run = LayerWise(launch, mesh)
    run.train(2)
    had = run.held()
    run.save(folder / "named", "dp_reshardable")
    run.save(folder / "legacy", "legacy")
    losses, later = run.train(1, 2), run.held()
    wrong: list[str] = []
    if launch.rank == 0:
        wrong += unequal(folder, ["named", "legacy"])
        converted(folder / "named", folder / "from named", mesh, "torch", "layer_wise")
        converted(folder / "legacy", folder / "hp", mesh, "hp", None)
        converted(folder / "hp", folder / "from legacy", mesh, "torch", None)
    dist.barrier()
    for source in ("from named", "from legacy"):
        wrong += [f"{source}: {what}" for what in run.unlike(folder / source, "legacy", had, losses, later)]
    return wrong


@pytest.mark.slow  # a run of Megatron on four ranks, two saves, three conversions and two loads
@pytest.mark.timeout(240)
@without_any
@pytest.mark.parametrize("name", MESHES)
def test_it_trains_on_from_what_is_written(name: str, tmp_path: Path) -> None:
    mesh, ranks = MESHES[name]
    for wrong in run_ranks(ranks, _there_and_back, mesh, tmp_path, timeout_s=200.0):
        assert wrong == []


def _owned(launch: Launch) -> tuple[str, int, int]:
    """Name of a rank's file, parameters in it, and of the model."""
    from megatron.core import parallel_state

    of_model = functools.partial(parallel_state.initialize_model_parallel, context_parallel_size=2)
    parallel_state.initialize_model_parallel = of_model
    run = LayerWise(launch, Mesh(features("")))
    owned = sum(len(group["params"]) for group in run.optimizer.param_groups)
    return run.own_file(Path()), owned, len(list(run.chunks[0].parameters()))


@without_any
def test_context_parallel_ranks_have_different_states_and_one_file() -> None:
    """Why such files are refused: data- and context-parallel ranks share parameters, the former alone name files."""
    (first, ours, count), (second, theirs, _) = run_ranks(2, _owned)
    assert first == second
    assert ours + theirs == count


def _saved(launch: Launch, body: dict[str, Any], folder: Path) -> str:
    from megatron.training import checkpointing, global_vars

    run = Run(launch, body)
    run.step(0)
    args = arguments(body, Load(folder, is_legacy=True))
    args.save, args.async_save = str(folder), False
    global_vars.set_args(args)
    try:
        checkpointing.save_checkpoint(1, [run.model], run.optimizer, run.schedule, 0)
    except AttributeError as error:
        return str(error)
    return ""


@pytest.mark.skipif(_is_before(19), reason="megatron-core has the buffer layout since 0.19")
def test_megatron_does_not_save_it_with_buffer_layout(tmp_path: Path) -> None:
    """Why that is not written: megatron-core's own ``save_checkpoint`` fails."""
    _, body = truth(unpacked("mcore019_muon_lwl_dense_dp2_dpr", tmp_path))
    wanted = "'ChainedOptimizer' object has no attribute 'save_state_dict_to_file'"
    assert run_ranks(2, _saved, body, tmp_path) == [wanted] * 2
