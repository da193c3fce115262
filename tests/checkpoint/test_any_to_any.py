"""Every format to every other and back, all tensors and step counts the same. HP_MUON_ALL_PAIRS=1 takes all fixtures.

Public reports of reference/checkpoints.md, section 2, have their tests here and beside:
1, 2, 15, 16: test_megatron_fsdp, test_legacy (both directions with the optimizer, experts by their global number).
3, 5: test_megatron_fsdp (gate and up are cut on the whole tensor). 6: test_megatron_fsdp, test_torch_dist.
4, 9, 14: ``others.wrong`` and ``there_and_back`` (every element is there, no state is lost without a word).
7: test_legacy (the experts' optimizer is made and unmade). 8, 19: test_random_states_of_expert_ranks below.
10: test_torch_dcp (groups by rule). 12, 21: test_legacy (missing files). 13: test_momentum_keeps_its_dtype below.
17: test_hf. 18: test_fsdp2. 20: test_convert (memory limit). 22: test_hyper_parallel.
"""

import os
from pathlib import Path

import pytest
import torch

from hp_muon_plugin.bench.made_up import gpt
from hp_muon_plugin.checkpoint.canonical import Info, Key, Kind, RunState, Target
from hp_muon_plugin.checkpoint.convert import convert, plan
from hp_muon_plugin.checkpoint.formats import open_checkpoint, writer
from hp_muon_plugin.checkpoint.verify import compared
from tests.checkpoint.fixtures import MadeUp
from tests.checkpoint.others import fixture, fixtures, there_and_back, written

FORMATS = ["torch", "fsdp_dtensor", "fsdp2", "torch_dcp", "hyper_parallel", "torch_dist", "hp"]
CHOSEN = ["mcore019/muon_lw_dense_dp2_legacy", "megatron_fsdp019/moehet_ep2_dp2", "torch_fsdp2/moe_stacked_ws2"]
CORRUPT = "mcore019/dense_dp2_fr_mb"
ALL = [name for name in fixtures("*/*") if name != CORRUPT] if os.environ.get("HP_MUON_ALL_PAIRS") else CHOSEN
LOST_FIELDS = {"consumed_samples", "momentum"}
"""What torch_dist always states and a source without arguments does not."""


@pytest.mark.parametrize("via", FORMATS)
@pytest.mark.parametrize("name", ALL)
def test_there_and_back(name: str, via: str, tmp_path: Path) -> None:
    source = open_checkpoint(fixture(name, tmp_path) / "ckpt")
    found = there_and_back(source, via, tmp_path / "out")
    unsaid = LOST_FIELDS if via == "torch_dist" and not source.state().args else set()
    assert [item for item in found if item not in unsaid] == []


@pytest.mark.parametrize("to", FORMATS)
def test_kinds_of_tensors_are_plain_text_in_files(to: str, tmp_path: Path) -> None:
    """Readers name them by members of an enumeration, which no loader allows in a pickle."""
    made = gpt(1, hidden=16)
    done = convert(plan(made, to, Target()), tmp_path / "out", drop=True)
    assert len(done.tensors) == len(made.tensors())
    opened = open_checkpoint(tmp_path / "out", to)
    assert {type(key.kind) for key in opened.tensors()} <= {str, Kind}
    assert [str(item) for item in compared(made, opened, rtol=None, atol=None, count=lambda nbytes: None)] == []


def test_random_states_of_expert_ranks_stay_with_their_ranks(tmp_path: Path) -> None:
    """Reports 8 and 19: a rank never gets another's state, and a rank without one is counted as lost."""
    keys = ("random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state", "rng_tracker_states")
    states = {
        name: {"states": {**dict.fromkeys(keys[:2], (1, 2)), **{key: torch.tensor([seed]) for key in keys[2:]}}}
        for seed, name in enumerate(("pp0.tp0", "pp0.tp0.ep1"))
    }
    shape = {f"decoder.layers.0.mlp.experts.local_experts.{index}.linear_fc2.weight": (4, 4) for index in range(4)}
    infos = {Key(name, "weight"): Info(value, torch.float32) for name, value in shape.items()}
    source = MadeUp(infos, RunState(random=states))
    assert writer("torch").losses(source, Target(ep=2)) == []
    two = written(source, "torch", tmp_path / "two", Target(ep=2))
    for seed, name in enumerate(("pp0.tp0", "pp0.tp0.ep1")):
        assert two.state().random[name]["states"]["torch_rng_state"].item() == seed
    (line,) = writer("torch").losses(source, Target(ep=4))
    assert line.startswith("random state of 2 of 4 ranks")


@pytest.mark.parametrize("via", ["torch", "fsdp_dtensor", "fsdp2", "torch_dcp", "hyper_parallel"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_momentum_keeps_its_dtype(via: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Report 13: torch casts state to the parameter's dtype when it loads; a conversion never does."""
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    infos = {Key(name, "weight"): Info((8, 4), torch.float32), Key(name, "momentum_buffer"): Info((8, 4), dtype)}
    source = MadeUp(infos, RunState(hyper={name: {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}}))
    other = written(source, via, tmp_path / "out")
    assert other.tensors()[Key(name, "momentum_buffer")].dtype == dtype
    assert torch.equal(other.read(Key(name, "momentum_buffer")), source.read(Key(name, "momentum_buffer")))
