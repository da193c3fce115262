"""Through every format and back to Megatron's: no tensor changes, and neither do steps, groups and schedule."""

from pathlib import Path

import pytest

from hp_muon_plugin.checkpoint import convert
from hp_muon_plugin.checkpoint.canonical import Target
from hp_muon_plugin.checkpoint.formats import FORMATS, open_checkpoint
from tests.checkpoint.fixtures import differences, unpacked

WITH_OPTIMIZER = [name for name in FORMATS if name != "hf"]


@pytest.mark.parametrize("name", ["mcore016_moe_ep2_dp2_dpr", "mcore019_muon_lwl_dense_dp2_dpr"])
@pytest.mark.parametrize("to", WITH_OPTIMIZER)
def test_there_and_back(to: str, name: str, tmp_path: Path) -> None:
    source = open_checkpoint(unpacked(name, tmp_path) / "ckpt")
    target = Target(ep=2 if "ep2" in name else 1)
    report = convert.convert(convert.plan(source, to, target), tmp_path / to, drop=True)  # random state by data rank
    assert not report.dropped
    assert not report.changed
    there = open_checkpoint(tmp_path / to)
    assert there.format == to
    convert.convert(convert.plan(there, "torch_dist", target), tmp_path / "back", drop=True)
    back = open_checkpoint(tmp_path / "back")
    assert not differences(source, back)
    before, after = source.state(), back.state()
    assert (after.steps, after.iteration, after.flops) == (before.steps, before.iteration, before.flops)
    assert after.hyper == before.hyper
    assert after.scheduler == before.scheduler
    assert after.vocab_size == before.vocab_size
    assert after.consumed_samples == before.consumed_samples
