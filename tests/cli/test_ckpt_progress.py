"""What a user sees while a checkpoint is converted: bytes, rate and time left on a terminal, lines elsewhere."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from hp_muon_plugin.bench.made_up import gpt
from hp_muon_plugin.checkpoint.canonical import Target
from hp_muon_plugin.checkpoint.convert import convert, plan
from hp_muon_plugin.cli.ckpt import run
from hp_muon_plugin.cli.ckpt_progress import Bar


def test_a_terminal_has_a_bar_with_bytes_rate_and_time_left(tmp_path: Path) -> None:
    screen = io.StringIO()
    bar = Bar(Console(file=screen, force_terminal=True, width=120))
    try:
        convert(plan(gpt(1, hidden=16), "hp", Target()), tmp_path / "out", progress=bar)
        assert [(task.description, task.completed == task.total) for task in bar._progress.tasks] == [
            ("write", True),
            ("verify", True),
        ]
        bar.note("[a note] that stays")
    finally:
        bar.close()
    told = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    for stage in ("write", "verify"):
        assert re.search(rf"{stage} +\S+ +1\.\d/1\.\d MiB +[\d.?]+ ?\S*B/s +\d+:\d\d:\d\d", told), told
    assert "[a note] that stays" in told


def test_elsewhere_each_stage_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(plan(gpt(1, hidden=16), "fsdp2", Target()), tmp_path / "in")
    assert run(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "hp"]) == 0
    told = capsys.readouterr().err.splitlines()
    assert [re.sub(r"[\d.]+", "#", line) for line in told] == ["write: # GiB in # s", "verify: # GiB in # s"]
