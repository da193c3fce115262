"""``hp-muon bench newton-schulz``: what it writes, not how fast anything is."""

import json
from pathlib import Path

import pytest
import torch

from hp_muon_plugin.bench.calibrate import calibrate
from hp_muon_plugin.bench.machine import Rates
from hp_muon_plugin.bench.newton_schulz import OURS, contest, judge, kernels, least_bytes, least_flops
from hp_muon_plugin.bench.ns_cases import MISSION, Case, parse_case, read_cases
from hp_muon_plugin.bench.timing import Times, interleave, paired_ratio
from hp_muon_plugin.cli.main import main
from hp_muon_plugin.config.choices import FloatDtype
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.layout.spec import ParamSpec, Role, plain_matrix
from hp_muon_plugin.muon.algorithm import TABLE, Form, choose
from hp_muon_plugin.muon.plan import build_plan
from hp_muon_plugin.muon.rule_file import load_table, save_table

CPU = torch.device("cpu")


def bench(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "newton-schulz", *arguments])
    return int(ended.value.code or 0)


def test_rows_hold_ours_every_peer_the_ratio_and_the_floor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = tmp_path / "shapes.txt"
    shapes.write_text("# mine\n3x12x40\n\n[2,16,20]+update  # experts\n")
    assert bench("--shapes", str(shapes), "--threads", "1", "--seconds", "0.1", "--out", str(tmp_path)) == 0
    found = json.loads((tmp_path / "newton_schulz.json").read_text())
    assert [row["case"] for row in found["rows"]] == ["3x12x40", "[2,16,20]+update"]
    for row in found["rows"]:
        assert row["threads"] == 1
        assert row["clock"] == "cpu"
        assert {"torch.optim.Muon (bf16)", "loop (fp32)", "stacked (bf16)"} <= set(row["peers"])
        assert set(row["wall"]) == {"ours", *row["peers"]}
        assert set(row["wall_ratios"]) == set(row["peers"])
        assert row["ratio"] == min(row["ratios"].values())
        assert row["right_ratio"] >= row["ratio"]
        assert 0 < row["floor"] < row["ours"]
        assert row["errors"]["ours"] < 1e-4 < row["errors"]["torch.optim.Muon (bf16)"] < 0.1
        assert row["notes"]["GFLOP/s"] > 0
    assert found["machine"]["device"] == "cpu"
    text = (tmp_path / "newton_schulz.md").read_text()
    assert "| 3x12x40 |" in text
    assert "kernels" in text
    assert (tmp_path / "newton_schulz.png").stat().st_size > 1000
    assert "3x12x40 (1 threads): ours" in capsys.readouterr().out


def test_every_contender_computes_the_same() -> None:
    for case in (parse_case("3x20x60", "x"), parse_case("[3,60,20]", "x")):
        for name, error in judge(contest(case, CPU)).items():
            assert error < (3e-2 if "bf16" in name else 5e-5), name


def test_every_contender_updates_the_same() -> None:
    prepared = contest(parse_case("[3,20,60]+update", "x"), CPU)
    assert set(prepared.runs) == set(prepared.results)
    assert kernels(prepared.runs[OURS], CPU).total() <= 35
    assert kernels(prepared.runs["loop (fp32)"], CPU).total() > 3 * 15


@pytest.mark.parametrize("text", ["74x24x10240", "[32,24,10240]", "1024x4096", "8x3x4+update", "[2,3,4]+update"])
def test_a_case_is_written_as_it_is_read(text: str) -> None:
    assert str(parse_case(text, "x")) == text


def test_the_missions_shapes_are_built_in() -> None:
    assert {"74x24x10240", "[32,24,10240]", "[48,128,2048]", "1024x4096", "2048x5120"} <= {str(c) for c in MISSION}


@pytest.mark.parametrize("text", ["", "24", "x24x3", "0x3x4", "3x0", "[3,4", "a x b"])
def test_a_wrong_shape_names_itself(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    if text == "[3,4":  # a bracket left open is forgiven nowhere
        with pytest.raises(ConfigError, match="is no shape"):
            parse_case(text, "--only")
    assert bench("--only", text) == 2
    assert f"hp-muon: --only={text}: is no shape" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threads", "0"], "--threads=0: is no list of thread counts"),
        (["--threads", "1,x"], "--threads=1,x: is no list of thread counts"),
        (["--device", "tpu"], "--device=tpu: is no device"),
        (["--shapes", "gone.txt"], "--shapes=gone.txt: there is no such file"),
        (["--seconds", "0"], "--seconds=0.0: must be above 0"),
        (["--table", "gone.json"], "gone.json"),
    ],
)
def test_wrong_options_name_themselves(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*arguments) == 2
    assert message in capsys.readouterr().err


def test_an_empty_file_of_shapes_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "none.txt").write_text("# nothing\n")
    with pytest.raises(ConfigError, match="there is no shape in it"):
        read_cases(tmp_path / "none.txt")


def test_every_round_runs_everyone_once_and_the_first_one_changes() -> None:
    order: list[str] = []
    times = interleave({n: (lambda n=n: order.append(n)) for n in "abc"}, device=CPU, budget_s=0, least=3)
    assert order == [*"abc", *"abc", *"bca", *"cab"]
    assert all(len(found.cpu) == len(found.wall) == 3 for found in times.values())


def test_a_paired_ratio_is_the_median_within_rounds() -> None:
    slow, fast = Times([2.0, 40.0, 6.0], [1.0, 1.0, 1.0]), Times([1.0, 10.0, 2.0], [2.0, 4.0, 1.0])
    assert paired_ratio(slow, fast, "cpu") == 3.0
    assert paired_ratio(slow, fast, "wall") == 0.5


def test_the_floor_is_the_longer_of_products_and_copies() -> None:
    case = Case(74, 24, 10240)
    assert least_flops(case) == 74 * 3 * 24 * 24 * 10240
    assert least_bytes(case) == 74 * 24 * 10240 * 8
    assert Rates(1e9, 1e9, 1e9).floor_s(2e9, 1e9) == 2.0
    assert Rates(1e9, 1e9, 1e9).floor_s(1e9, 3e9) == 3.0


def test_a_calibrated_table_is_read_back_and_used(tmp_path: Path) -> None:
    lines: list[str] = []
    rules = calibrate(CPU, budget_s=0.0, shorts=(12, 40), aspects=(3.0, 1.0), report=lines.append)
    assert [line.partition(":")[0] for line in lines] == ["12 x 36", "12 x 12", "40 x 120", "40 x 40"]
    path = tmp_path / "deep" / "table.json"
    save_table(rules, path, note="here")
    read = load_table(path)
    assert read[: len(rules)] == tuple(rules)
    assert read[len(rules) :] == TABLE
    assert choose("cuda", 64, 64, table=read) == choose("cuda", 64, 64)
    spec = ParamSpec("w", Role.matrix, (40, 120), view=plain_matrix(40, 120))
    planned = build_plan([spec], HpMuon(ns_table=str(path))).stages[0].batches[0].algorithm
    assert planned == choose("cpu", 40, 120, table=read)


def test_the_smallest_matrices_of_a_cpu_take_float32_whatever_is_asked_for() -> None:
    for asked in (None, FloatDtype.bfloat16, FloatDtype.float16, FloatDtype.float32):
        rules = calibrate(CPU, budget_s=0.0, shorts=(12,), aspects=(1.0,), dtype=asked, report=lambda _: None)
        assert (rules[0].algorithm.form, rules[0].algorithm.dtype) == (Form.standard, FloatDtype.float32)
        assert rules[0].asked == asked


@pytest.mark.parametrize("content", ["", "{}", '{"rows": [{"device": "cpu"}]}', "[1]"])
def test_a_damaged_table_names_itself(content: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"table\.json: is no table of algorithms"):
        load_table(path)
