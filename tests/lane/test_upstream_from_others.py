"""Checkpoints of other trainers, converted, and loaded by megatron-core's own code under its DDP wrapper.

What it loads is compared with the same tensors set by hand: all that ranks hold, the losses of two steps, and all of
that after them, to the bit. HP_MUON_ALL_PAIRS=1 takes all fixtures of Megatron-FSDP, torch FSDP2, ``torch_dcp`` and
HyperParallel.
"""

import os
from pathlib import Path

import pytest
from dist_pool import run_ranks

from hp_muon_plugin.checkpoint import convert
from hp_muon_plugin.checkpoint.canonical import Target
from hp_muon_plugin.checkpoint.formats import open_checkpoint
from hp_muon_plugin.megatron.versions import core_version
from lane.any_fixture import described, folder_of, lane
from lane.planted import forms, planted_and_loaded
from lane.upstream_runs import Load
from tests.checkpoint.others import fixtures, wrong

CHOSEN = ["megatron_fsdp019/moehet_ep2_dp2", "torch_fsdp2/moe_stacked_ws2"]
ALL = bool(os.environ.get("HP_MUON_ALL_PAIRS"))
FAMILIES = ("megatron_fsdp019", "torch_fsdp2", "mcore019_torch_dcp", "hyper_parallel")
if ALL:
    CHOSEN = [name for family in FAMILIES for name in fixtures(f"{family}/*")] or CHOSEN


@pytest.mark.slow  # conversions, and loads on two ranks
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", CHOSEN)
def test_megatron_trains_on_from_another_trainers_checkpoint(name: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path)
    source = open_checkpoint(folder / "ckpt")
    body = described(source, folder)
    assert wrong(source, folder, weights_are_masters=name.startswith("megatron_fsdp")) == []
    if body["optimizer"] == "muon" and lane() != "mcore019":
        pytest.skip("megatron-core's own Muon is in 0.19 alone")
    for to, sharding, is_distributed in forms(body) if ALL else forms(body)[::2]:
        found = convert.plan(source, to, Target(ep=body["ep"], sharding=sharding, megatron=core_version().lane))
        assert all("random state" in line for line in found.losses), found.losses
        dst = tmp_path / f"{to}_{sharding}"
        convert.convert(found, dst, drop=bool(found.losses))
        run = body | {"distributed_optimizer": is_distributed}
        load = Load(dst, to == "torch", random=False)
        for unlike in run_ranks(2, planted_and_loaded, run, folder / "ckpt", [load]):
            assert unlike == [[]], (to, sharding)
