"""What a rank that fails leaves for whoever watches."""

from pathlib import Path

import pytest

from hp_muon_plugin.train.environment import INIT_METHOD
from hp_muon_plugin.train.reports import leave_report, read_reports
from hp_muon_plugin.train.worker import report_failure

REPORT = {"rank": 1, "time": 2.0, "is_usage": False, "message": "why"}


def test_a_rank_whose_node_does_not_see_the_folder_makes_it(tmp_path: Path) -> None:
    """The rank ended with a traceback of its report, and without its reason."""
    folder = tmp_path / "outputs" / "train"
    assert report_failure(ValueError("why"), folder, 1) == 1
    (found,) = read_reports(folder, num_ranks=2)
    assert found["message"] == "ValueError: why"
    assert "ValueError: why" in (folder / "rank1.log").read_text()


def test_a_report_without_room_in_the_folder_lies_beside_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    folder, other = tmp_path / "file" / "train", tmp_path / "meeting"
    monkeypatch.delenv(INIT_METHOD, raising=False)
    leave_report(REPORT, folder)  # nowhere to go: the rank ends all the same
    monkeypatch.setenv(INIT_METHOD, f"file://{other}/store")
    leave_report(REPORT, folder)
    assert read_reports(folder, other, num_ranks=2) == [REPORT]


@pytest.mark.parametrize("content", ["", '{"rank": 1'])
def test_a_report_that_was_cut_off_is_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "rank0.error.json").write_text(content)
    leave_report(REPORT, tmp_path)
    assert read_reports(tmp_path, num_ranks=2) == [REPORT]
