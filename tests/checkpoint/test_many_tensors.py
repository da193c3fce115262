"""Models of many experts have hundreds of thousands of tensors: the work on each must not grow with their number."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import hp_muon_plugin.checkpoint
from hp_muon_plugin.checkpoint.canonical import Info, Key, RunState, Source, Target
from hp_muon_plugin.checkpoint.convert import convert, plan
from hp_muon_plugin.checkpoint.formats import FORMATS, open_checkpoint
from tests.checkpoint.fixtures import MadeUp
from tests.checkpoint.others import written

FEW, MANY = 32, 128


def _model(experts: int) -> MadeUp:
    names = [f"decoder.layers.0.mlp.experts.local_experts.{index}.linear_fc2.weight" for index in range(experts)]
    infos = {Key(name, "weight"): Info((2, 2), torch.float32) for name in names}
    for kind in ("exp_avg", "exp_avg_sq"):
        infos |= {Key(name, kind): Info((2, 2), torch.float32) for name in names}
    hyper = {name: {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1} for name in names}
    model = {"num_experts": experts, "num_layers": 1}
    return MadeUp(infos, RunState(iteration=3, hyper=hyper, steps=dict.fromkeys(names, 3.0), model=model))


def _lines(work: Callable[[], object]) -> int:
    """Lines of the checkpoint package that are run, each round of a loop counted."""
    root = str(Path(hp_muon_plugin.checkpoint.__file__).parent)
    ours: dict[CodeType, bool] = {}
    count = 0

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return line

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code not in ours:
            ours[code] = code.co_filename.startswith(root)
        return line if ours[code] else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def _convert(source: Source, to: str, folder: Path, sharding: str | None = None) -> None:
    convert(plan(source, to, Target(sharding=sharding)), folder, drop=True)


def _both_ways(experts: int, to: str, sharding: str | None, folder: Path) -> tuple[int, int]:
    """Lines of a conversion from our format, and of one back, each with opening and verification."""
    made = written(_model(experts), "hp", folder / "made")
    there = _lines(lambda: _convert(made, to, folder / "there", sharding))
    made.close()

    def back() -> None:
        source = open_checkpoint(folder / "there", to)
        _convert(source, "hp", folder / "back")
        source.close()

    return there, _lines(back)


@pytest.mark.parametrize(
    ("to", "sharding"), [*((name, None) for name in FORMATS if name != "hf"), ("torch_dist", "dp_reshardable")]
)
def test_work_for_each_tensor_does_not_grow_with_their_number(to: str, sharding: str | None, tmp_path: Path) -> None:
    few = _both_ways(FEW, to, sharding, tmp_path / "few")
    many = _both_ways(MANY, to, sharding, tmp_path / "many")
    for direction, a, b in zip(("there", "back"), few, many, strict=True):
        assert b < 1.15 * MANY / FEW * a, f"{direction}: {a} lines for {FEW} experts, {b} for {MANY}"
