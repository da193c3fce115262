"""``hp-muon bench convert``: real conversions and copies, in one report."""

import json
from pathlib import Path

import pytest

from hp_muon_plugin.bench import convert
from hp_muon_plugin.bench.made_up import gpt
from hp_muon_plugin.cli.bench import run
from hp_muon_plugin.errors import ConfigError


def test_a_report_has_a_row_for_each_conversion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--mib", "2", "--seconds", "0.1", "--folder", str(tmp_path), "--out", str(tmp_path / "out")]
    assert run(["convert", *options, "--only", "fsdp2-torch_dist", "--only", "torch_dist-hp"]) == 0
    assert "fsdp2-torch_dist" in capsys.readouterr().out
    rows = json.loads((tmp_path / "out" / "convert.json").read_text())["rows"]
    nbytes = sum(info.nbytes for info in gpt(2).tensors().values())
    for row, name in zip(rows, ("fsdp2-torch_dist", "torch_dist-hp"), strict=True):
        assert row["case"].startswith(f"{name} ")
        assert {"cp", "cp and sync"} <= set(row["peers"])
        assert row["floor"] == row["peers"]["cp"]
        assert row["notes"]["rounds"] >= 3
        assert row["notes"]["bytes"] > nbytes * (0.8 if name.startswith("fsdp2") else 1.0)
    assert rows[0]["right_ratio"] == rows[0]["ratios"]["dcp_to_torch_save"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("text", ["hp", "hp-", "hp-nothing", "hf-hp", "-hp"])
def test_what_is_no_conversion_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write FROM-TO with two of hp, torch_dist"):
        convert.parse_case(text)


@pytest.mark.parametrize(
    ("options", "message"), [(["--mib", "0"], "--mib=0"), (["--folder", "nowhere"], "--folder=nowhere: is no folder")]
)
def test_options_are_checked_first(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["convert", *options]) == 2
    assert message in capsys.readouterr().err
