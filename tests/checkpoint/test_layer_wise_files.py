"""Files of megatron-core's layer-wise Muon in legacy checkpoints: whose is what, on any mesh, and what is refused."""

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from hp_muon_plugin.checkpoint.canonical import Info, Key, Kind, RunState, Target
from hp_muon_plugin.checkpoint.formats import open_checkpoint, writer
from hp_muon_plugin.checkpoint.formats.group_members import Param, members
from hp_muon_plugin.checkpoint.formats.layer_wise import Shares, dealt, in_layer_wise_order
from hp_muon_plugin.errors import CheckpointError, ConfigError, DamageError
from tests.checkpoint.fixtures import MadeUp, differences
from tests.checkpoint.others import fixture, there_and_back, written

LAYER_WISE = "mcore019/muon_lw_dense_dp2_legacy"
MUON = {"lr": 0.1, "momentum_beta": 0.9, "weight_decay": 0.1, "wd_mult": 1.0, "default_config": True}
ADAM = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1, "wd_mult": 1.0, "default_config": True}


class Different(MadeUp):
    """Tensors of the same shape differ, but a master is its weight."""

    def read(self, key: Key, start: int = 0, stop: int | None = None) -> torch.Tensor:
        seed = f"{key.name}{'' if key.kind in (Kind.weight, Kind.main) else key.kind}"
        found = super().read(key, start, stop).float()
        return ((found + zlib.crc32(seed.encode()) % 251) % 251).to(self._infos[key].dtype)


def experts(count: int = 4) -> Different:
    """A mixture of experts under Muon: several sizes occur in several groups."""
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (16, 8),
        "output_layer.weight": (16, 8),
        "decoder.final_layernorm.weight": (8,),
    }
    for layer in range(2):
        at = f"decoder.layers.{layer}."
        shapes |= {f"{at}self_attention.linear_proj.weight": (8, 16), f"{at}input_layernorm.weight": (8,)}
        for expert in range(count):
            shapes |= {f"{at}mlp.experts.local_experts.{expert}.linear_fc1.weight": (16, 8)}
            shapes |= {f"{at}mlp.experts.local_experts.{expert}.linear_fc2.weight": (8, 8)}
    infos = {Key(name, Kind.weight): Info(shape, torch.bfloat16) for name, shape in shapes.items()}
    infos |= {Key(name, Kind.main): Info(shape, torch.float32) for name, shape in shapes.items()}
    hyper: dict[str, dict[str, Any]] = {}
    for name, shape in shapes.items():
        is_muon = len(shape) == 2 and name.startswith("decoder.")
        kinds = (Kind.momentum,) if is_muon else (Kind.exp_avg, Kind.exp_avg_sq)
        infos |= {Key(name, kind): Info(shape, torch.float32) for kind in kinds}
        decay = {} if len(shape) == 2 else {"wd_mult": 0.0, "weight_decay": 0.0}
        hyper[name] = {**MUON} if is_muon else {**ADAM, **decay}
    infos |= {Key(f"decoder.layers.{layer}.mlp.router.expert_bias", Kind.buffer): Info((count,), torch.float32)
              for layer in range(2)}  # fmt: skip
    steps = {name: 3.0 for name in shapes if "betas" in hyper[name]}
    return Different(infos, RunState(iteration=3, hyper=hyper, steps=steps))


def test_parameters_are_dealt_to_and_fro() -> None:
    """The example in megatron-core's code; one rank alone keeps the model's order."""
    names = [f"p{index}" for index in range(10)]
    numels = {name: 64 + index // 3 for index, name in enumerate(names)}
    backwards = dict(zip(names, reversed(numels.values()), strict=True))
    deal = dealt([{}], [names], numels, Shares(4))
    assert [deal.share(rank, 0)[0] for rank in range(4)] == [
        ["p0", "p7", "p8"], ["p1", "p6", "p9"], ["p2", "p5"], ["p3", "p4"]
    ]  # fmt: skip
    assert dealt([{}], [names], backwards, Shares(1)).share(0, 0) == [names]
    assert dealt([{}], [names], backwards, Shares(2)).share(0, 0)[0][0] == "p7"  # of equal ones the first
    groups = [{"is_expert_parallel": False}, {"is_expert_parallel": True}]
    apart = dealt(groups, [names[:4], names[4:6]], numels, Shares(4, experts=2))
    assert [apart.share(rank, rank // 2) for rank in range(4)] == [
        [["p0"], ["p4"]], [["p1"], ["p4"]], [["p2"], ["p5"]], [["p3"], ["p5"]]
    ]  # fmt: skip


def test_ranks_lie_in_folders_as_megatron_numbers_them() -> None:
    """Of eight ranks with two tensor ranks, of which experts use one, and four expert ranks."""
    shares = Shares(4, tensors=2, inside=1, experts=4)
    assert shares.expert_data == 2
    assert [shares.in_folder(tensor, expert) for expert in range(4) for tensor in range(2)] == [
        [0, 2], [], [], [0, 2], [1, 3], [], [], [1, 3]
    ]  # fmt: skip
    assert [shares.expert_data_of(0, data) for data in range(4)] == [0, 0, 1, 1]
    assert not Shares(1, tensors=1, experts=2).divides


def test_groups_of_earlier_emerging_optimizers_are_muons() -> None:
    """They say ``momentum_beta``; a checkpoint of megatron-core 0.16 was refused, since every group fitted a matrix."""
    params = [Param("embedding.word_embeddings.weight", (16, 8), False), Param("decoder.x.weight", (8, 8), False)]
    assert members([dict(MUON), dict(ADAM)], params, {}, "file") == [["decoder.x.weight"], [params[0].name]]


def test_groups_are_in_megatrons_order() -> None:
    """What overrules options comes later; experts' Adam is apart before groups name their optimizer."""
    dense, apart = {"is_expert_parallel": False}, {"is_expert_parallel": True}
    bare, plain = {**ADAM, **dense, "wd_mult": 0.0}, {**ADAM, **dense}
    parts = [[({**MUON, **dense}, ["a"])], [({**MUON, **apart}, ["b"])], [(bare, ["c"]), (plain, ["d"])]]
    parts += [[({**ADAM, **apart}, ["e"])]]
    assert [[name for _, names in part for name in names] for part in in_layer_wise_order(parts, {})] == [
        ["a", "b"], ["d", "c"], ["e"]
    ]  # fmt: skip
    named = [[({**values, "optimizer": "adam"} if "betas" in values else values, names) for values, names in part]
             for part in parts]  # fmt: skip
    assert [len(part) for part in in_layer_wise_order(named, {})] == [2, 3]
    fast = {**plain, "max_lr": 0.5}
    order = in_layer_wise_order([[(bare, ["c"]), (fast, ["f"]), (plain, ["d"])]], {"decoupled_lr": 0.5})
    assert [names for _, names in order[0]] == [["d"], ["f"], ["c"]]


@pytest.mark.parametrize(
    ("data", "mesh"),
    [(1, {}), (3, {}), (4, {"ep": 2}), (2, {"tp": 2, "pp": 2}), (4, {"tp": 2, "pp": 2, "ep": 4})],
    ids=str,
)
def test_bits_come_back_from_any_mesh(data: int, mesh: dict[str, int], tmp_path: Path) -> None:
    options = {"data_parallel_size": str(data)} | ({"expert_tensor_parallel_size": "1"} if len(mesh) == 3 else {})
    target = Target(**mesh, sharding="layer_wise", options=options)
    source = experts()
    other = written(source, "torch", tmp_path / "out", target)
    assert differences(source, other) == []
    assert other.state().model["legacy_optimizer"] == "layer_wise"
    assert (other.state().steps, other.state().args["data_parallel_size"]) == (source.state().steps, data)
    files = sorted(path.name for path in (tmp_path / "out").rglob("layer_wise_optimizer_*.pt"))
    assert len(files) == data * mesh.get("tp", 1) * mesh.get("pp", 1)
    again = written(other, "torch", tmp_path / "again", Target(**mesh, options={**options}))
    assert differences(source, again) == []
    assert again.state().model["legacy_optimizer"] == "layer_wise"  # as the source had it


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    infos = {Key("a.weight", kind): Info((4, 4), torch.float32) for kind in ("weight", "exp_avg")}
    source, adam = experts(), MadeUp(infos, RunState(hyper={"a.weight": dict(ADAM)}))
    two, layer_wise = {"data_parallel_size": "2"}, "layer_wise"
    four = Target(ep=4, sharding=layer_wise, options=two)
    for made, target, message in (
        (adam, Target(sharding=layer_wise, options=two), "sharding=layer_wise: the layer-wise optimizer is Muon's"),
        (source, Target(sharding=layer_wise), "a file of its own, .*\n  fix: --option data_parallel_size=N"),
        (source, Target(options=two), "data_parallel_size=2: is for Muon's .*\n  fix: add --sharding layer_wise"),
        (adam, Target(options=two), "data_parallel_size=2: is for Muon's .*\n  fix: leave it out"),
        (source, four, "data_parallel_size=2: .*\n  fix: choose a multiple of 4"),
    ):
        with pytest.raises(ConfigError, match=message):
            writer("torch").losses(made, target)
    with pytest.raises(ConfigError, match="data_parallel_size=2: is no option of the format torch_dist"):
        written(source, "torch_dist", tmp_path / "out", Target(options=two))


def test_a_missing_file_is_named_with_its_folder(tmp_path: Path) -> None:
    target = Target(ep=2, sharding="layer_wise", options={"data_parallel_size": "4"})
    written(experts(), "torch", tmp_path / "out", target).close()
    (tmp_path / "out" / "mp_rank_00_001" / "layer_wise_optimizer_3.pt").unlink()
    with pytest.raises(DamageError, match=r"mp_rank_00_001 has no layer_wise_optimizer_3\.pt"):
        open_checkpoint(tmp_path / "out")


def test_files_of_context_parallel_ranks_are_refused(tmp_path: Path) -> None:
    """Megatron names them by data-parallel rank alone: one overwrites the other's."""
    two = {"data_parallel_size": "2"}
    written(experts(), "torch", tmp_path / "out", Target(sharding="layer_wise", options=two)).close()
    file = tmp_path / "out" / "mp_rank_00" / "model_optim_rng.pt"
    value = torch.load(file, weights_only=False)
    value["args"].context_parallel_size = 2
    torch.save(value, file)
    with pytest.raises(CheckpointError, match=r"context_parallel_size 2: .*overwrote"):
        open_checkpoint(tmp_path / "out")


def test_a_checkpoint_of_megatron_through_another_mesh(tmp_path: Path) -> None:
    source = open_checkpoint(fixture(LAYER_WISE, tmp_path) / "ckpt")
    there = Target(tp=2, pp=2, sharding="layer_wise", options={"data_parallel_size": "3"})
    assert there_and_back(source, "torch", tmp_path / "out", there=there) == []
    assert sorted(path.name for path in (tmp_path / "out" / "back").rglob("layer*")) == []  # of another mesh: plain
