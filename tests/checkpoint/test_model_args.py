"""Arguments of the model's shape, for Megatron, of checkpoints of trainers that have none."""

from pathlib import Path

import pytest

from hp_muon_plugin.bench.made_up import gpt
from hp_muon_plugin.checkpoint.canonical import Target
from hp_muon_plugin.checkpoint.formats import open_checkpoint
from tests.checkpoint.others import fixture, written

STACKED = "torch_fsdp2/moe_stacked_ws2"
TO = ["torch_dist", "torch", "torch_dcp", "fsdp_dtensor"]


@pytest.mark.parametrize("to", TO)
def test_what_megatrons_loader_compares_is_told_by_shapes(to: str, tmp_path: Path) -> None:
    """Without ``num_layers`` there, ``load_checkpoint`` stops with an AttributeError."""
    source = open_checkpoint(fixture(STACKED, tmp_path) / "ckpt")
    assert source.state().args == {}
    args = written(source, to, tmp_path / "out").state().args
    told = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 8}
    assert {name: args[name] for name in told} == told


@pytest.mark.parametrize("to", TO)
def test_heads_that_nothing_tells_are_asked_for(to: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = gpt(1, hidden=16)
    del source.state().model["num_attention_heads"]
    written(source, to, tmp_path / "untold")
    assert "--option num_attention_heads=32" in caplog.text
    caplog.clear()
    args = written(source, to, tmp_path / "told", Target(options={"num_attention_heads": "2"})).state().args
    assert args["num_attention_heads"] == 2
    assert caplog.text == ""
