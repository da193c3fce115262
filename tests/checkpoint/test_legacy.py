"""Megatron's legacy mp_rank_* folders: three forms of optimizer state, any tensor, pipeline and expert size."""

import shutil
from pathlib import Path

import pytest
import torch

from hp_muon_plugin.checkpoint import torch_archive
from hp_muon_plugin.checkpoint.canonical import Info, Key, RunState, Target
from hp_muon_plugin.checkpoint.files import Files
from hp_muon_plugin.checkpoint.formats import open_checkpoint
from hp_muon_plugin.checkpoint.formats.flat_layout import layout, starts_of
from hp_muon_plugin.errors import CheckpointError, ConfigError
from tests.checkpoint.fixtures import MadeUp, truth
from tests.checkpoint.others import fixture, fixtures, there_and_back, written, wrong

LAYER_WISE = "mcore019/muon_lw_dense_dp2_legacy"
MOE = "torch_fsdp2/moe_stacked_ws2"
ALL = fixtures("mcore0*/*legacy", LAYER_WISE)


@pytest.mark.parametrize("name", ALL)
def test_reads_every_tensor(name: str, tmp_path: Path) -> None:
    folder = fixture(name, tmp_path)
    source = open_checkpoint(folder / "ckpt")
    assert source.format == "torch"
    assert wrong(source, folder) == []
    state, (_, body) = source.state(), truth(folder)
    assert (state.flops, state.vocab_size, state.consumed_samples) == (12345, 125, body["consumed_train_samples"])
    experts = "moe" in name
    assert there_and_back(source, "torch", tmp_path / "out", there=Target(tp=2, pp=2, ep=4 if experts else 1)) == []


def unlike(ours: object, theirs: object, where: str = "") -> list[str]:
    """Where two loaded files differ; order of dicts counts, our record and Megatron's arguments do not."""
    if isinstance(theirs, torch.Tensor):
        return [] if isinstance(ours, torch.Tensor) and torch.equal(ours, theirs) else [where]
    if isinstance(theirs, dict):
        if not isinstance(ours, dict) or ours.keys() != theirs.keys():
            return [f"{where}: {list(ours) if isinstance(ours, dict) else ours} for {list(theirs)}"]
        return [item for key in theirs for item in unlike(ours[key], theirs[key], f"{where}.{key}")]
    if isinstance(theirs, list):
        if not isinstance(ours, list) or len(ours) != len(theirs):
            return [where]
        return [
            item for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) for item in unlike(a, b, f"{where}.{i}")
        ]
    return [] if ours == theirs else [f"{where}: {ours} for {theirs}"]


@pytest.mark.parametrize("name", ALL)
def test_files_are_as_megatron_writes_them(name: str, tmp_path: Path) -> None:
    """Loaded by torch, file by file: names in order, groups, flat buffers, schedule."""
    folder = next((fixture(name, tmp_path) / "ckpt").glob("iter_*"))
    source = open_checkpoint(folder)
    written(source, "torch", tmp_path / "out", Target(ep=source.state().args.get("expert_model_parallel_size") or 1))
    for path in sorted((tmp_path / "out").rglob("*.pt")):
        ours = torch.load(path, weights_only=False)
        there = torch_archive.load(Files(folder), str(path.relative_to(tmp_path / "out")))
        if path.name == "model_optim_rng.pt":
            tensors = [[name for name in value["model"] if "_extra_state" not in name] for value in (ours, there)]
            assert tensors[0] == tensors[1]
            kept = ("checkpoint_version", "iteration", "model", "optimizer", "opt_param_scheduler",
                    "num_floating_point_operations_so_far")  # fmt: skip
            ours, there = ({key: value[key] for key in kept} for value in (ours, there))
        assert unlike(ours, there) == []


@pytest.mark.parametrize("sharding", ["distributed", "plain"])
def test_forms_and_sizes(sharding: str, tmp_path: Path) -> None:
    """Reports 7, 15 and 16: experts by their global number, their optimizer apart where they are on several ranks."""
    source = open_checkpoint(fixture(MOE, tmp_path) / "ckpt")
    target = Target(tp=2, pp=2, ep=2, sharding=sharding)
    assert there_and_back(source, "torch", tmp_path / "out", there=target) == []
    folders = sorted(path.name for path in (tmp_path / "out" / "there").iterdir())
    assert folders == [f"mp_rank_{t:02d}_{p:03d}_{e:03d}" for t in range(2) for p in range(2) for e in range(2)]
    model = tmp_path / "out" / "there" / "mp_rank_01_001_001" / "model_optim_rng.pt"
    saved = torch.load(model, weights_only=False)  # torch's own reader takes it
    local = saved["model"]["decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"]
    whole = source.read(Key("decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight", "weight"))
    assert torch.equal(
        local, torch.cat([whole[12:24], whole[36:48]])
    )  # its half of the gate, then of the up projection
    if sharding == "distributed":
        flats = torch.load(model.with_name("distrib_optim.pt"), weights_only=False)
        assert flats[0] is None  # dense state is the first expert rank's
        assert set(flats[1][0][torch.float32, torch.float32]) == {"param", "exp_avg", "exp_avg_sq", "numel_unpadded"}


def test_sizes_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    source = open_checkpoint(fixture(MOE, tmp_path) / "ckpt")
    for target, message in (
        (Target(ep=3), "ep=3: the model has 4 experts, which do not divide"),
        (Target(pp=4), "pp=4: the model has 2 layers, which do not divide"),
        (Target(sharding="sparse"), "sharding=sparse: no form"),
    ):
        with pytest.raises(ConfigError, match=message):
            written(source, "torch", tmp_path / message[:4], target)
    with pytest.raises(ConfigError, match=r"--tp=3: does not divide the 128 rows of the vocabulary"):
        written(source, "torch", tmp_path / "tp", Target(tp=3))
    source.state().vocab_size = 125
    padded = Target(tp=3, options={"make_vocab_size_divisible_by": "128"})
    with pytest.raises(CheckpointError, match=r"cannot be cut into 3 tensor-parallel parts"):
        written(source, "torch", tmp_path / "padded", padded)


def test_missing_ranks_and_files_are_named(tmp_path: Path) -> None:
    source = open_checkpoint(fixture(MOE, tmp_path) / "ckpt")
    written(source, "torch", tmp_path / "out", Target(tp=2, ep=2)).close()
    shutil.rmtree(tmp_path / "out" / "mp_rank_01_001")
    shutil.rmtree(tmp_path / "out" / "mp_rank_00_001")
    with pytest.raises(
        CheckpointError, match=r"no folder of expert-parallel rank 1.*mp_rank_00_001/model_optim_rng.pt"
    ):
        open_checkpoint(tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "mp_rank_01_000")
    with pytest.raises(CheckpointError, match=r"no folder of tensor-parallel rank 1.*mp_rank_01_000"):
        open_checkpoint(tmp_path / "out")
    written(source, "torch", tmp_path / "flat").close()
    (tmp_path / "flat" / "mp_rank_00" / "distrib_optim.pt").unlink()
    with pytest.raises(CheckpointError, match=r"has parameter groups but no distrib_optim\.pt"):
        open_checkpoint(tmp_path / "flat")


def test_a_missing_layer_wise_file_is_named(tmp_path: Path) -> None:
    folder = fixture(LAYER_WISE, tmp_path)
    if not folder.is_relative_to(tmp_path):
        shutil.copytree(folder, tmp_path / "copy")
        folder = tmp_path / "copy"
    rank = next((folder / "ckpt").glob("iter_*")) / "mp_rank_00"
    (rank / "layer_wise_optimizer_0.pt").unlink()
    with pytest.raises(CheckpointError, match=r"layer_wise_optimizer_0\.pt"):
        open_checkpoint(folder / "ckpt")


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("run",)


def test_a_malicious_pickle_is_refused_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mp_rank_00").mkdir()
    torch.save({"model": {}, "args": _Bomb()}, tmp_path / "mp_rank_00" / "model_optim_rng.pt")
    with pytest.raises(CheckpointError, match=r"model_optim_rng\.pt: its pickle wants __builtin__\.print"):
        open_checkpoint(tmp_path)
    assert "run" not in capsys.readouterr().out


def test_flat_layouts() -> None:
    """Backwards, each at a multiple of 64 within its bucket; buckets close when full, padding at their end is cut."""
    entries = [("a", 100, False), ("b", 64, False), ("c", 10, False)]
    assert layout(entries) == ({"c": 0, "b": 64, "a": 128}, 228)
    assert layout(entries, 10) == ({"c": 0, "b": 10, "a": 74}, 174)
    assert starts_of(entries, 174) == {"c": 0, "b": 10, "a": 74}
    assert starts_of(entries, 228) == {"c": 0, "b": 64, "a": 128}
    assert starts_of(entries, 175) is None
    alone = [("embedding", 8, True), ("x", 100, False), ("output", 8, True)]
    assert layout(alone) == ({"output": 0, "x": 8, "embedding": 136}, 144)  # its place is aligned before it is given


def test_grouped_mlp_keeps_its_matrices_the_other_way_round(tmp_path: Path) -> None:
    """``weight1`` (H, E * 2F) holds E matrices (H, 2F) one after another, ``weight2`` (E * F, H) as many (F, H)."""
    hidden, ffn, count = 6, 4, 2
    first = torch.randn(count, hidden, 2 * ffn)
    second = torch.randn(count, ffn, hidden)
    model = {
        "decoder.layers.0.mlp.experts.weight1": first.reshape(hidden, -1),
        "decoder.layers.0.mlp.experts.weight2": second.reshape(-1, hidden),
    }
    from argparse import Namespace

    (tmp_path / "mp_rank_00").mkdir()
    torch.save({"model": model, "args": Namespace(num_experts=count)}, tmp_path / "mp_rank_00" / "model_optim_rng.pt")
    source = open_checkpoint(tmp_path)
    prefix = "decoder.layers.0.mlp.experts.local_experts."
    for index in range(count):
        assert torch.equal(source.read(Key(f"{prefix}{index}.linear_fc1.weight", "weight")), first[index].t())
        assert torch.equal(source.read(Key(f"{prefix}{index}.linear_fc2.weight", "weight")), second[index].t())
        assert torch.equal(
            source.read(Key(f"{prefix}{index}.linear_fc1.weight", "weight"), 2, 5), first[index].t()[2:5]
        )


def test_virtual_stages_follow_one_another(tmp_path: Path) -> None:
    """With two chunks on two stages, chunk 1 of stage 0 comes after chunk 0 of stage 1."""
    from argparse import Namespace

    args = Namespace(pipeline_model_parallel_size=2)
    name = "decoder.layers.0.input_layernorm.weight"
    for stage in range(2):
        folder = tmp_path / f"mp_rank_00_{stage:03d}"
        folder.mkdir()
        chunks = {f"model{chunk}": {name: torch.full((3,), float(2 * chunk + stage))} for chunk in range(2)}
        torch.save({**chunks, "args": args}, folder / "model_optim_rng.pt")
    source = open_checkpoint(tmp_path)
    for layer in range(4):
        found = source.read(Key(f"decoder.layers.{layer}.input_layernorm.weight", "weight"))
        assert torch.equal(found, torch.full((3,), float(layer)))


def test_steps_that_differ_in_a_group_are_a_loss(tmp_path: Path) -> None:
    from hp_muon_plugin.checkpoint.formats import writer

    shapes = {"decoder.layers.0.mlp.linear_fc2.weight": (4, 4), "decoder.layers.1.mlp.linear_fc2.weight": (4, 4)}
    infos = {
        Key(name, kind): Info(shape, torch.float32) for name, shape in shapes.items() for kind in ("weight", "exp_avg")
    }
    hyper = {name: {"lr": 0.1, "weight_decay": 0.1} for name in shapes}
    source = MadeUp(infos, RunState(hyper=hyper, steps=dict(zip(shapes, (1.0, 2.0), strict=True))))
    assert any(
        "steps of parameters of one group that differ" in line for line in writer("torch").losses(source, Target())
    )
    plain = written(source, "torch", tmp_path / "plain", Target(sharding="plain"))
    assert plain.state().steps == source.state().steps
