"""The commands themselves on every tested megatron-core: a short run of two ranks, and what ``doctor`` finds."""

import json
from importlib import metadata
from pathlib import Path

import pytest
from cli.commands import TINY, hp_muon

from hp_muon_plugin.megatron.versions import core_version


def test_a_short_run_and_the_doctor(tmp_path: Path) -> None:
    version = metadata.version("megatron-core")
    if core_version().lane == (0, 16):
        pytest.skip("tests/cli has many runs of the main environment")
    done = hp_muon("train", *TINY, "topology.ep=2", "run.steps=3", "run.name=small", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    entries = [json.loads(line) for line in (tmp_path / "outputs" / "small" / "metrics.jsonl").read_text().splitlines()]
    losses = [entry["loss/train"] for entry in entries if "loss/train" in entry]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    looked = hp_muon("doctor", folder=tmp_path)
    assert looked.returncode == 0, looked.stdout + looked.stderr
    assert version in looked.stdout
