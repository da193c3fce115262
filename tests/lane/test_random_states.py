"""Random states of a run of ours, converted, are what Megatron's ranks go on from."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import run_ranks

from hp_muon_plugin.checkpoint.canonical import Info, Key, RunState, Target
from hp_muon_plugin.checkpoint.formats import writer
from hp_muon_plugin.config.trainer import Topology
from hp_muon_plugin.megatron.random_state import take_random_state
from hp_muon_plugin.train.setup import Launch, seed_everything
from lane.harness import moe, start, train_config
from lane.upstream_random import draws, set_random
from tests.checkpoint.fixtures import MadeUp
from tests.checkpoint.others import written

MESH = Target(tp=2, ep=2)


def _drawn() -> dict[str, Any]:
    """The next numbers of every generator, those of Megatron's tracker too."""
    from megatron.core import tensor_parallel

    with tensor_parallel.get_cuda_rng_tracker().fork():
        return {**draws(), "tracker": torch.rand(2).tolist()}


def _converted(launch: Launch, folder: str) -> list[list[Any]]:
    """What each rank draws from its own state, and from each of those that Megatron would load for it."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    start(launch, train_config(moe(), Topology(tp=2, ep=2, etp=2)))
    for _ in range(launch.rank):
        _drawn()
    states: list[Any] = [None] * launch.world_size
    dist.all_gather_object(states, take_random_state(torch.device("cpu")))
    found = [_drawn()]
    if launch.rank == 0:
        sizes = {"ranks": launch.world_size, "tp": 2, "pp": 1, "ep": 2, "etp": 2, "device": "cpu"}
        shapes = {f"decoder.layers.0.mlp.experts.local_experts.{index}.linear_fc2.weight": (4, 4) for index in range(2)}
        infos = {Key(name, "weight"): Info(shape, torch.float32) for name, shape in shapes.items()}
        random = {f"rank{rank}": state for rank, state in enumerate(states)}
        ours = written(MadeUp(infos, RunState(random=random, other={"ranks": sizes})), "hp", Path(folder, "ours"))
        for to in ("torch_dist", "torch"):
            assert writer(to).losses(ours, MESH) == []
            writer(to).write(ours, _made(folder, to), MESH, lambda nbytes: None, 2**20)
    dist.barrier()
    tensor, data = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_data_parallel_rank()
    for whole, place in (((1, 2, 2), (0, tensor, data)), ((1, 2), (0, tensor))):
        sharded = ShardedObject("rng_state", [], whole, place, replica_id=0 if len(place) == 3 else data)
        loaded = dist_checkpointing.load({"rng_state": sharded}, f"{folder}/torch_dist", strict="assume_ok_unexpected")
        set_random(loaded["rng_state"][0])
        found.append(_drawn())
    expert = parallel_state.get_expert_model_parallel_rank()
    file = Path(folder, "torch", f"mp_rank_{tensor:02d}_{expert:03d}", "model_optim_rng.pt")
    set_random(torch.load(file, map_location="cpu", weights_only=False)["rng_state"][0])
    return [*found, _drawn()]


def _made(folder: str, name: str) -> Path:
    path = Path(folder, name)
    path.mkdir()
    return path


@pytest.mark.slow
def test_every_rank_goes_on_drawing_where_ours_stopped(tmp_path: Path) -> None:
    found = run_ranks(4, _converted, str(tmp_path))
    own = [numbers[0] for numbers in found]
    assert all(a != b for rank, a in enumerate(own) for b in own[:rank])
    for rank, (_, of_data_rank, of_first, of_expert) in enumerate(found):
        assert of_data_rank == own[rank]
        assert of_first == own[rank % 2]  # of the first data rank, as Megatron keeps one for all of them
        assert of_expert == own[rank]


def test_states_of_another_number_of_ranks_are_told_to_be_lost() -> None:
    """A checkpoint of which a rank's state is missing, as of ranks that went on without theirs."""
    infos = {Key("decoder.final_layernorm.weight", "weight"): Info((4,), torch.float32)}
    sizes = {"ranks": 2, "tp": 1, "pp": 1, "ep": 1, "etp": 1, "device": "cpu"}
    state = {"python": (3, (1, 2), None), "torch": torch.zeros(4, dtype=torch.uint8)}
    source = MadeUp(infos, RunState(random={"rank0": state}, other={"ranks": sizes}))
    (line,) = writer("torch_dist").losses(source, Target())
    assert line.startswith("random state of (pipeline, tensor) ranks (0, 0)")


def _seeded(launch: Launch) -> dict[str, Any]:
    start(launch, train_config(moe(), Topology()))
    seed_everything(7)
    return draws()


@pytest.mark.once
def test_every_generator_begins_at_the_seed() -> None:
    """Python's and numpy's began anywhere, so that checkpoints of the same run were not the same."""
    first, second = run_ranks(2, _seeded)
    assert first == second
    assert first["random"][0] == random.Random(7).random()
