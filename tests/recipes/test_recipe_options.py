"""A mistyped argument of a recipe's script starts nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("parity/run.py dense_muon", "dense_muon is neither a study nor OPTION=VALUE; studies are bf16, "),
        ("parity/run.py bf16/hp_fspd", "bf16 has no such run; there are megatron_ddp, hp_fsdp, "),
        ("parity/run.py --kep", "unrecognized arguments: --kep"),
        ("parity/run.py --plot bf16", "leave out bf16"),
        ("weight_decay/run.py --kep", "unrecognized arguments: --kep"),
        ("weight_decay/run.py run.steps", "run.steps is not OPTION=VALUE"),
        ("weight_decay/run.py --plot run.steps=9", "leave out run.steps=9"),
        ("demo/run.py --sweeep", "unrecognized arguments: --sweeep"),
        ("demo/run.py sweep", "sweep is not OPTION=VALUE"),
    ],
)
def test_a_typo_is_named_and_starts_nothing(arguments: str, says: str, tmp_path: Path) -> None:
    """``dense_muon`` started every study, which takes hours, and ``--kep`` did so without keeping anything."""
    script, *rest = arguments.split()
    ended = subprocess.run(
        [sys.executable, RECIPES / script, *rest], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert ended.returncode == 2, ended.stderr
    assert says in ended.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", ["parity/run.py", "weight_decay/run.py", "demo/run.py"])
def test_help_helps_and_trains_nothing(script: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, RECIPES / script, "--help"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "OPTION=VALUE" in ended.stdout
    assert not list(tmp_path.iterdir())


def test_a_study_whose_runs_fail_says_so(tmp_path: Path) -> None:
    """It ended with 0 although no run had been made."""
    command = [sys.executable, RECIPES / "parity" / "run.py", "dense_hp_muon/hp_fsdp", "model.num_layers=0"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == 1
    assert "model.num_layers=0" in ended.stderr
    assert "dense_hp_muon/hp_fsdp" in ended.stderr.splitlines()[-1]
