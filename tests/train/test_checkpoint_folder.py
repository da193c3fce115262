"""What is seen of a checkpoint to resume from before ranks start."""

from pathlib import Path

import pytest

from hp_muon_plugin.config.trainer import Checkpoint, Train
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.train.checkpoint_folder import check_checkpoints


@pytest.mark.parametrize(
    ("tracker", "why"),
    [
        (None, "there is neither manifest.json nor"),
        ("3", "names iter_0000003, which has no manifest.json"),
        ("7", "names iter_0000007, which has no manifest.json"),
        ("release", "holds 'release', not a number of steps"),
    ],
)
def test_checkpoints_of_others_are_refused_before_ranks_start(tracker: str | None, why: str, tmp_path: Path) -> None:
    """Where there was a tracker file, as Megatron has it, every rank started and rank 0 failed with exit code 1."""
    (tmp_path / "iter_0000003").mkdir()
    if tracker is not None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracker)
    config = Train(checkpoint=Checkpoint(resume=str(tmp_path)))
    with pytest.raises(ConfigError, match=why) as caught:
        check_checkpoints(config, tmp_path / "run")
    assert "hp-muon ckpt convert --to hp" in str(caught.value)
    if tracker == "3":
        (tmp_path / "iter_0000003" / "manifest.json").touch()
        check_checkpoints(config, tmp_path / "run")
