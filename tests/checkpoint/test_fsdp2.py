"""torch FSDP2 with DCP: nested and flat optimizer states, stacked experts, uneven worlds, HSDP."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hp_muon_plugin.checkpoint.canonical import Key, Momentum, Target
from hp_muon_plugin.checkpoint.dcp_files import DcpFolder
from hp_muon_plugin.checkpoint.formats import open_checkpoint
from hp_muon_plugin.errors import CheckpointError, ConfigError
from tests.checkpoint.others import fixture, fixtures, there_and_back, written, wrong

STACKED = "torch_fsdp2/moe_stacked_ws2"
ALL = fixtures("torch_fsdp2/*", STACKED)


@pytest.mark.parametrize("name", ALL)
def test_reads_every_tensor_and_writes_the_same_keys(name: str, tmp_path: Path) -> None:
    folder = fixture(name, tmp_path)
    source = open_checkpoint(folder / "ckpt")
    assert source.format == "fsdp2"
    assert wrong(source, folder) == []
    assert there_and_back(source, "fsdp2", tmp_path / "out") == []
    ours, theirs = DcpFolder(tmp_path / "out" / "there"), DcpFolder(folder / "ckpt")
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert ours.problems() == []
    if "muon" not in name:  # whose fixture pads groups of SGD with nothing, torch's own union of keys is not kept
        assert set(theirs.objects) == set(ours.objects) - {"hp_muon"}
        assert all(ours.planner_data[key] == path for key, path in theirs.planner_data.items())


def test_styles_and_stacks_can_be_chosen(tmp_path: Path) -> None:
    source = open_checkpoint(fixture(STACKED, tmp_path) / "ckpt")
    flat = Target(options={"style": "flat", "experts": "separate"})
    assert there_and_back(source, "fsdp2", tmp_path / "out", there=flat) == []
    keys = DcpFolder(tmp_path / "out" / "there")
    assert "model.decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight" in keys.tensors
    assert "optim.param_groups.decoder.final_layernorm.weight.lr" in keys.objects
    with pytest.raises(ConfigError, match="--option style=curly: no such choice"):
        written(source, "fsdp2", tmp_path / "no", Target(options={"style": "curly"}))


def test_torch_loads_what_was_written(tmp_path: Path) -> None:
    source = open_checkpoint(fixture(STACKED, tmp_path) / "ckpt")
    written(source, "fsdp2", tmp_path / "out")
    name = "decoder.layers.0.mlp.experts.linear_fc1.weight"
    state = {"model": {name: torch.empty(4, 48, 32)}, "optim": {"state": {name: {"exp_avg": torch.empty(4, 48, 32)}}}}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    single = name.replace(".experts.", ".experts.local_experts.2.")
    assert torch.equal(state["model"][name][2], source.read(Key(single, "weight")))
    assert torch.equal(state["optim"]["state"][name]["exp_avg"][2], source.read(Key(single, "exp_avg")))


def small_model(path: Path, **optim: object) -> Path:
    """A checkpoint as user code saves it."""
    weight = torch.arange(12.0).reshape(4, 3)
    state = {"model": {"layer.weight": weight}, "optim": optim, "iteration": 5}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def test_momentum_is_converted_when_the_reader_asks(tmp_path: Path) -> None:
    """A sum is 1 / (1 - beta) times an average; of SGD's group the convention is not known, so one must say it."""
    buffer = torch.randn(4, 3, generator=torch.Generator().manual_seed(3))
    group = {"lr": 0.1, "momentum": 0.75, "dampening": 0, "params": ["layer.weight"]}
    state = {"layer.weight": {"momentum_buffer": buffer}}
    source = open_checkpoint(small_model(tmp_path / "in", state=state, param_groups=[group]))
    assert source.state().momentum is None
    key = Key("layer.weight", "momentum_buffer")
    kept = written(source, "fsdp2", tmp_path / "kept")
    assert torch.equal(kept.read(key), buffer)
    average = written(
        source, "fsdp2", tmp_path / "average", Target(options={"momentum_is": "sum", "momentum": "average"})
    )
    assert average.state().momentum is Momentum.average
    assert torch.equal(average.read(key), buffer * 0.25)
    again = written(average, "fsdp2", tmp_path / "sum", Target(options={"momentum": "sum"}))
    assert again.state().momentum is Momentum.sum
    assert torch.equal(again.read(key), buffer)  # a quarter is exact
    with pytest.raises(ConfigError, match="--option momentum=mean: no such choice"):
        written(source, "fsdp2", tmp_path / "no", Target(options={"momentum": "mean"}))


def test_muon_of_torch_keeps_an_average(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.randn(4, 3))
    optimizer = torch.optim.Muon([parameter], lr=0.1)
    parameter.grad = torch.randn(4, 3)
    optimizer.step()
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    state = {"layer.weight": optimizer.state[parameter]}
    saved = small_model(tmp_path / "in", state=state, param_groups=[{**group, "params": ["layer.weight"]}])
    source = open_checkpoint(saved)
    assert source.state().momentum is Momentum.average
    assert torch.equal(
        source.read(Key("layer.weight", "momentum_buffer")), optimizer.state[parameter]["momentum_buffer"]
    )


def test_step_keeps_its_value(tmp_path: Path) -> None:
    """bfloat16 and float16 cannot count to 16,777,215: a step is a number on the way, and float32 in the file."""
    state = {"layer.weight": {"step": torch.tensor(16_777_215.0), "exp_avg": torch.zeros(4, 3)}}
    source = open_checkpoint(small_model(tmp_path / "in", state=state, param_groups=[{"lr": 1.0, "params": []}]))
    again = written(source, "fsdp2", tmp_path / "out")
    assert again.state().steps == {"layer.weight": 16_777_215.0}


def test_a_tied_output_layer_under_both_names_is_kept_once(tmp_path: Path) -> None:
    """Report 18: torch saves a tied weight under both names, and its optimizer state once."""
    weight = torch.randn(16, 4)
    name, alias = "embedding.word_embeddings.weight", "output_layer.weight"
    state = {
        "model": {name: weight, alias: weight.clone()},
        "optim": {"state": {name: {"exp_avg": torch.zeros(16, 4)}}, "param_groups": [{"lr": 1.0, "params": [name]}]},
    }
    dcp.save(state, checkpoint_id=tmp_path / "in", no_dist=True)
    source = open_checkpoint(tmp_path / "in")
    assert {key.name for key in source.tensors()} == {name}
    assert source.state().model["tied"]


def test_state_of_an_unknown_parameter_is_refused(tmp_path: Path) -> None:
    state = {"other.weight": {"exp_avg": torch.zeros(4, 3)}}
    with pytest.raises(CheckpointError, match="optimizer state of other.weight, which the model does not have"):
        open_checkpoint(small_model(tmp_path / "in", state=state, param_groups=[]))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    dcp.save({"weights": {"a": torch.zeros(2)}}, checkpoint_id=tmp_path / "in", no_dist=True)
    with pytest.raises(CheckpointError, match=r"has no key that begins with model\..*weights\.a"):
        open_checkpoint(tmp_path / "in")


@pytest.mark.parametrize("to", ["torch_dist", "torch", "torch_dcp", "fsdp_dtensor"])
def test_groups_for_megatron_have_the_limits_of_the_schedule(to: str, tmp_path: Path) -> None:
    """A group's own ``max_lr`` goes before the arguments' there: the rate of the last step would be the highest."""
    source = open_checkpoint(fixture(STACKED, tmp_path) / "ckpt")
    schedule = source.state().scheduler
    assert "max_lr" not in source.state().hyper["decoder.final_layernorm.weight"]
    again = written(source, to, tmp_path / "out").state()
    for name, values in again.hyper.items():
        assert (values["max_lr"], values["min_lr"]) == (schedule["max_lr"], schedule["min_lr"]), name
        assert (values["lr_mult"], values["is_decoupled_lr"]) == (1.0, False)
