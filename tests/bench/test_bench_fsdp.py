"""``hp-muon bench fsdp``: what it writes, whom it believes, and what it counts; not how fast anything is."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hp_muon_plugin.bench.fsdp import LIMIT, Supernodes, _Result
from hp_muon_plugin.bench.fsdp_cases import NAMED, Case, build, parse_case
from hp_muon_plugin.bench.fsdp_contenders import ALONE, OURS, TORCH, Contender, Setting, build_ours, build_torch
from hp_muon_plugin.bench.fsdp_race import race
from hp_muon_plugin.bench.fsdp_rank import Plan, make_mesh
from hp_muon_plugin.cli.main import main
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.train.environment import Launch
from tests.dist_pool import joined, run_ranks

TINY = Case(16, 3)
NUM_TOKENS = 8
PLAN = Plan([str(TINY)], 1, NUM_TOKENS, 0.0, has_optimizer=True, has_memory=False, nodes=0, timeout_s=30.0)


def bench(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "fsdp", *arguments])
    return int(ended.value.code or 0)


def test_rows_hold_ours_the_peer_the_ratio_the_floor_and_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # the ranks are processes of their own, which import torch
    assert bench("--only", "16x2e4", "--ranks", "2", "--tokens", "8", "--seconds", "0.1", "--out", str(tmp_path)) == 0
    found = json.loads((tmp_path / "fsdp.json").read_text())
    assert [(row["case"], row["clock"]) for row in found["rows"]] == [("16x2e4 2 ranks", c) for c in ("wall", "cpu")]
    for row in found["rows"]:
        assert row["ratio"] == row["ratios"][TORCH] > 0
        assert row["floor"] > 0
        assert set(row["peers"]) == {TORCH, ALONE}
        assert row["errors"]["ours"] < LIMIT
        assert "WRONG" not in row["notes"]
        assert row["notes"][f"peak MiB of {OURS}"] > 0
    assert found["machine"]["ranks"] == 2
    assert "16x2e4 2 ranks: ours" in capsys.readouterr().out


class Unreduced(Contender):
    """Trains on this rank's gradients alone: fast, and wrong."""


def build_unreduced(setting: Setting) -> Contender:
    return Unreduced(build(setting.case), has_optimizer=setting.has_optimizer)


def race_three(launch: Launch, replicas: int, has_optimizer: bool) -> dict[str, Any]:
    joined(launch)
    builders = {OURS: build_ours, TORCH: build_torch, "unreduced": build_unreduced}
    setting = Setting(TINY, make_mesh(replicas), has_optimizer)
    found = race(setting, builders, num_tokens=NUM_TOKENS, seconds=0.0)
    return {
        name: {"error": f.error, "cpu": f.cpu, "wall": f.wall, "counted": f.counted, "calls": f.calls, "sent": {}}
        for name, f in found.items()
    }


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_a_wrong_contender_is_told_and_has_no_part_in_the_ratio(has_optimizer: bool) -> None:
    ranks = run_ranks(2, race_three, 1, has_optimizer)
    races = [{"found": found, "link": (1e9, 1e9)} for found in ranks]
    assert races[0]["found"][OURS]["error"] < LIMIT
    assert races[0]["found"][TORCH]["error"] < LIMIT
    assert races[0]["found"]["unreduced"]["error"] > 0.1
    row = _Result(PLAN, str(TINY), 2, None, races, []).row(OURS, "wall")
    assert row.notes["WRONG"] == "unreduced"
    assert row.ratio == row.ratios[TORCH]
    for found in ranks:
        found[OURS]["error"] = 0.5
    row = _Result(PLAN, str(TINY), 2, None, races, []).row(OURS, "wall")
    assert row.ratio == 0.0
    assert row.right_ratio is None


@pytest.mark.parametrize(("world_size", "replicas"), [(2, 1), (4, 2)])
def test_one_gather_and_one_reduction_per_unit(world_size: int, replicas: int) -> None:
    found = run_ranks(world_size, race_three, replicas, True)[0][OURS]["counted"]
    num_layers, num_kept = TINY.layers, 2  # the last two layers are found gathered by backward, as is the root
    assert found["all_gather dp_shard"][0] == 1 + num_layers + (num_layers - num_kept)
    assert found["reduce_scatter dp_shard"][0] == 1 + num_layers
    numel = sum(parameter.numel() for parameter in build(TINY).parameters())
    assert found["reduce_scatter dp_shard"][1] == pytest.approx(4 * numel, rel=0.01)
    assert found.get("all_reduce dp_replicate", (0, 0))[0] == (1 if replicas > 1 else 0)


def test_torchs_collectives_are_counted_by_their_buffers() -> None:
    found = run_ranks(2, race_three, 1, True)[0][TORCH]["calls"]
    numel = sum(parameter.numel() for parameter in build(TINY).parameters())
    (scatter,) = (name for name in found if "reduce_scatter" in name)
    assert found[scatter][0] == 1 + TINY.layers
    assert found[scatter][1] == pytest.approx(4 * numel, rel=0.01)


def test_the_slow_link_bounds_the_step_on_the_testbed() -> None:
    sent = [{"eth0": [3_000_000] * 3}, {"eth0": [2_000_000] * 3}, {}, {}]
    entry = {"error": 0.0, "cpu": [0.1] * 3, "wall": [0.2] * 3, "counted": {}, "calls": {}}
    races = [{"found": {n: entry | {"sent": s} for n in (OURS, TORCH, ALONE)}, "link": (1e9, 1e9)} for s in sent]
    result = _Result(replace(PLAN, nodes=2), str(TINY), 4, Supernodes(Path("x"), 2, "100mbit"), races, [])
    row = result.row(OURS, "wall")
    assert row.floor == pytest.approx(1e3 * 3e6 / 12.5e6)
    assert row.notes[f"slow-link MB of {OURS}"] == 3.0
    assert result.row(OURS, "cpu").floor == pytest.approx(100.0)


@pytest.mark.parametrize("text", [*(str(case) for case in NAMED.values()), "16x2e4+bf16"])
def test_a_case_is_written_as_it_is_read(text: str) -> None:
    assert str(parse_case(text, "x")) == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "512"], "--only=512: is no case"),
        (["--only", "0x3"], "--only=0x3: is no case"),
        (["--replicas", "3"], "--replicas=3: does not divide the ranks"),
        (["--seconds", "0"], "--seconds=0.0: must be above 0"),
        (["--tokens", "0"], "--tokens=0: must be above 0"),
        (["--rate", "none"], "--testbed and --rate belong to it"),
        (["--supernodes", "3"], "--supernodes=3: does not divide the ranks"),
        (["--supernodes", "2", "--testbed", "gone"], "--testbed=gone: there is no such program"),
    ],
)
def test_wrong_options_name_themselves(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("rate", "wanted"), [("none", 0.0), ("200mbit", 25e6), ("1gbit", 125e6)])
def test_a_rate_is_read_in_bytes(rate: str, wanted: float) -> None:
    assert Supernodes(Path("x"), 2, rate).bytes_per_s == wanted


def test_a_wrong_rate_names_itself() -> None:
    with pytest.raises(ConfigError, match="is no rate"):
        Supernodes(Path("x"), 2, "fast").bytes_per_s  # noqa: B018


def test_experts_share_tokens_equally(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--only", "16x2e4", "--tokens", "10") == 2
    assert "--tokens=10: 4 experts do not share them equally" in capsys.readouterr().err
