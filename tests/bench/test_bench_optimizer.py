"""``hp-muon bench optimizer``: what it writes, whom it believes, and who is missing; not how fast anything is."""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hp_muon_plugin.bench import opt_mission, opt_naive, opt_places
from hp_muon_plugin.bench.fsdp import Supernodes
from hp_muon_plugin.bench.opt_cases import parse_case
from hp_muon_plugin.bench.opt_contenders import OURS, Builder, Contender, Peer, Setting, torch_sharded
from hp_muon_plugin.bench.opt_convention import LEAST_LIMIT, Convention, Reference, Verdict
from hp_muon_plugin.bench.opt_everyone import peers
from hp_muon_plugin.bench.opt_lane import Job, Lane, LaneError
from hp_muon_plugin.bench.opt_naive import NAIVE
from hp_muon_plugin.bench.opt_ours import (
    CONVENTION,
    DEFAULT,
    REPLICATED,
    build_replicated,
    contenders,
    convention_of,
)
from hp_muon_plugin.bench.opt_peers import torch_muon
from hp_muon_plugin.bench.opt_places import Places, find_places
from hp_muon_plugin.bench.opt_race import Entrant, Found, Result, _turns, race
from hp_muon_plugin.bench.opt_rank import Rank, make_mesh
from hp_muon_plugin.bench.optimizer import Field, rows
from hp_muon_plugin.cli.main import main
from hp_muon_plugin.train.environment import Launch
from hp_muon_plugin.train.launch import Stop
from tests.dist_pool import joined, run_ranks

# they start ranks of several environments one after another: a slow, busy machine took over 120 s for some
pytestmark = pytest.mark.timeout(300)

TINY = "2x9x16+[4,12,8]"  # nine rows: ranks hold uneven shards
TORCH = "torch.optim.Muon"
REPLICATED_NAME = f"{OURS} {REPLICATED}"


def bench(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "optimizer", *arguments])
    return int(ended.value.code or 0)


def test_rows_hold_a_peer_of_another_interpreter_and_who_is_absent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "python"  # the same one, by another name: its ranks start as those of a foreign environment
    other.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', encoding="ascii")
    other.chmod(0o755)
    options = ["--only", "8x12+[2,8,4]", "--ranks", "2", "--seconds", "0.1", "--strategies", REPLICATED]
    options += ["--peers", f"{TORCH},muonium", "--peer-python", f"{TORCH}={other}", "--out", str(tmp_path)]
    assert bench(*options) == 0
    found = json.loads((tmp_path / "optimizer.json").read_text())
    assert [(row["case"], row["clock"]) for row in found["rows"]] == [
        ("8x12+[2,8,4] 2 ranks: replicated", clock) for clock in ("wall", "cpu")
    ]
    for row in found["rows"]:
        assert row["ratio"] == row["ratios"][TORCH] > 0
        assert row["floor"] > 0
        assert row["errors"][OURS] < LEAST_LIMIT
        assert row["errors"][TORCH] > LEAST_LIMIT  # it iterates in bf16
        assert "WRONG" not in row["notes"]
        assert "pip install muonium" in row["notes"]["absent muonium"]
    assert "absent: muonium" in capsys.readouterr().err


class PerShard(torch.optim.Optimizer):
    """Orthogonalises what a rank holds of a matrix as if it were the whole: no communication, and wrong."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            u, _, vt = torch.linalg.svd(parameter.grad.to_local(), full_matrices=False)
            parameter.to_local().sub_(u @ vt, alpha=0.1)


def build_per_shard(setting: Setting) -> Contender:
    return torch_sharded(setting, PerShard)


def weights_of(launch: Launch, folder: str, text: str, replicas: int, builders: dict[str, Builder]) -> None:
    joined(launch)
    torch.set_num_threads(1)
    setting = Setting(parse_case(text, "x"), make_mesh(replicas))
    rank = Rank.__new__(Rank)
    rank._running = {}
    for number, (name, build) in enumerate(builders.items()):
        rank._running[name] = build(setting)
        rank.do({"do": "judge", "name": name, "path": f"{folder}/{number}.{{}}.pt"})


def test_a_wrong_optimizer_is_told_and_has_no_part_in_the_ratio(tmp_path: Path) -> None:
    builders = {REPLICATED_NAME: build_replicated, TORCH: torch_muon, "per shard": build_per_shard}
    run_ranks(2, weights_of, str(tmp_path), TINY, 1, builders)
    reference = Reference(parse_case(TINY, "x"))
    verdicts = []
    for number, convention in enumerate([CONVENTION, peers()[TORCH].convention, CONVENTION]):
        ranks = [torch.load(tmp_path / f"{number}.{rank}.pt") for rank in range(2)]
        verdicts.append(reference.judge(convention, ranks))
    ours, right, wrong = verdicts
    assert ours.error < 1e-5
    assert right.is_right
    assert not wrong.is_right
    found = {
        name: entry_of(verdict) for name, verdict in zip((REPLICATED_NAME, TORCH, "per shard"), verdicts, strict=True)
    }
    for number in range(3):
        found["per shard"].rounds[number] = {"cpu": 0.001, "wall": 0.001}  # fast
    (row, _) = rows(result_of(found), FIELD, JOB)
    assert row.notes["WRONG"].startswith("per shard (layers.")
    assert row.ratio == row.ratios[TORCH] == pytest.approx(1.0)
    assert row.ratios["per shard"] < 1.0
    found[REPLICATED_NAME].verdict = wrong
    (row, _) = rows(result_of(found), FIELD, JOB)
    assert row.ratio == 0.0


@pytest.mark.parametrize(("replicas", "strategies"), [(1, DEFAULT), (2, ("auto",))])
def test_every_contender_of_ours_and_the_naive_form_are_right(
    tmp_path: Path, replicas: int, strategies: tuple[str, ...]
) -> None:
    text, num_ranks = "9x16+16x6+[4,6,8]", 2 * replicas
    builders = {**contenders(strategies, replicas=replicas), NAIVE: opt_naive.build}
    run_ranks(num_ranks, weights_of, str(tmp_path), text, replicas, builders)
    reference = Reference(parse_case(text, "x"))
    for number, name in enumerate(builders):
        ranks = [torch.load(tmp_path / f"{number}.{rank}.pt") for rank in range(num_ranks)]
        verdict = reference.judge(convention_of(name), ranks)
        assert verdict.is_right, name
    assert len(builders) == (13 if replicas == 1 else 5)


def test_the_missions_figures_stand_beside_ours() -> None:
    found = {name: entry_of(RIGHT) for name in ("ours allgather (fsdp2)", "ours allgather_dedup (fsdp2)")}
    for entry in found["ours allgather_dedup (fsdp2)"].rounds.values():
        entry["wall"] = 0.05
    result = replace(result_of(found), case=parse_case("dense", "x"))
    (figure,) = opt_mission.compare(result, replicas=1)
    assert (figure["mission"], figure["wall"], figure["cpu"]) == (3.76, 4.0, 1.0)
    assert "| 3.76 | 4.0 | 1.0 |" in opt_mission.table([figure])
    assert opt_mission.compare(result, replicas=2) == []
    found["ours allgather (fsdp2)"].verdict = Verdict(1.0, 1e-4, "")
    assert opt_mission.compare(result, replicas=1) == []
    assert opt_mission.table([]) == ""


def entry_of(verdict: Verdict) -> Found:
    return Found(verdict, {}, {number: {"cpu": 0.1, "wall": 0.2} for number in range(3)})


def result_of(found: dict[str, Found]) -> Result:
    rates = {clock: {"matmul": 1e9, "matmul_bf16": 1e9, "copy": 1e9} for clock in ("cpu", "wall")}
    return Result(parse_case(TINY, "x"), found, {"gone": "it broke"}, rates, {"cpu": 1e9, "wall": 1e9})


FIELD = Field((REPLICATED,), {}, Places(absent={"away": "not installed"}))
JOB = Job(2, 1, 60.0, Stop())
RIGHT = Verdict(0.0, 1e-4, "")


def test_who_fails_and_who_is_absent_stands_in_the_notes() -> None:
    (row, _) = rows(result_of({REPLICATED_NAME: entry_of(RIGHT)}), FIELD, JOB)
    assert row.notes["FAILED gone"] == "it broke"
    assert row.notes["absent away"] == "not installed"
    assert row.right_ratio is None


def test_rounds_are_paired_where_a_slow_peer_ran_in_some() -> None:
    found = {REPLICATED_NAME: entry_of(RIGHT), "slow": entry_of(RIGHT)}
    found["slow"].rounds = {1: {"cpu": 0.3, "wall": 0.6}}
    (row, _) = rows(result_of(found), FIELD, JOB)
    assert row.ratio == pytest.approx(3.0)


def test_the_slow_link_bounds_the_step_on_the_testbed() -> None:
    found = {REPLICATED_NAME: entry_of(RIGHT), TORCH: entry_of(RIGHT)}
    found[REPLICATED_NAME].sent, found[TORCH].sent = {"eth0": [3_000_000] * 3}, {"eth0": [9_000_000] * 3}
    job = Job(2, 1, 60.0, Stop(), Supernodes(Path("x"), 2, "100mbit"))
    (wall, _) = rows(result_of(found), FIELD, job)
    assert wall.floor == pytest.approx(1e3 * 3e6 / 12.5e6)
    assert wall.notes[f"slow-link MB of {TORCH}"] == 9.0


def test_a_slow_contender_runs_in_every_third_round() -> None:
    turns = list(_turns({"fast": 1.0, "slow": 5.0}, 0.0))
    assert [number for name, number in turns if name == "slow"] == [0, 3]
    assert [number for name, number in turns if name == "fast"] == [0, 1, 2, 3, 4]
    assert [name for name, number in turns if number == 3] == ["slow", "fast"]


def test_a_contender_that_breaks_its_lane_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    with Stop() as stop:
        lane = Lane(sys.executable, Job(1, 1, 60.0, stop), tmp_path / "lane")
        lane.start()
        try:
            entrants = {name: Entrant(lane, CONVENTION) for name in ("nobody", REPLICATED_NAME)}
            result = race(parse_case("4x6", "x"), entrants, lane, tmp_path, seconds=0.0)
        finally:
            lane.stop()
        assert "KeyError: 'nobody'" in result.failed["nobody"]
        assert result.found[REPLICATED_NAME].verdict.is_right
        assert len(result.found[REPLICATED_NAME].rounds) == 5


def test_a_lane_that_ended_between_two_cases_is_started_again(tmp_path: Path) -> None:
    """It ended the whole bench, and what was found before was lost."""
    with Stop() as stop:
        lane = Lane(sys.executable, Job(1, 1, 60.0, stop), tmp_path / "lane")
        lane.start()
        try:
            for process in lane._processes:
                process.kill()
                process.wait()
            result = race(
                parse_case("4x6", "x"), {REPLICATED_NAME: Entrant(lane, CONVENTION)}, lane, tmp_path, seconds=0.0
            )
        finally:
            lane.stop()
        assert result.found[REPLICATED_NAME].verdict.is_right


def test_a_lane_that_cannot_start_says_why(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no torch here >&2\nexit 3\n", encoding="ascii")
    python.chmod(0o755)
    with Stop() as stop, pytest.raises(LaneError, match="a rank ended: no torch here"):
        Lane(str(python), Job(2, 1, 60.0, stop), tmp_path / "lane").start()


def test_an_environment_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(opt_places, "_run", commands.append)
    monkeypatch.setattr(opt_places, "_importable", lambda python, found: list(found) if "made" in python else [])
    peer = Peer(
        build_replicated, Convention(), "some_module", ("some-package",), no_dependencies=("bare",), venv="made"
    )
    options: dict[str, Any] = {"named": {}, "folder": tmp_path, "replicas": 1, "is_here_only": False}
    python = tmp_path / "made" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    for _ in range(2):
        assert find_places({"peer": peer}, **options).python == {"peer": str(python)}
    assert [command[-1] for command in commands] == [str(tmp_path / "made"), "some-package", "bare"]
    assert "torch==2.13.0" in commands[1]
    assert "--no-deps" in commands[2]


def test_peers_without_a_place_are_absent_with_the_reason(tmp_path: Path) -> None:
    def peer(**options: Any) -> Peer:
        return Peer(build_replicated, Convention(), "hp_no_such_module", ("hp-no-such-package",), **options)

    wanted = {"flat": peer(has_replicas=False), "new": peer(needs_python=(3, 99)), "other": peer()}
    options: dict[str, Any] = {"named": {}, "replicas": 2}
    found = find_places({"flat": wanted["flat"], "new": wanted["new"]}, folder=tmp_path, is_here_only=False, **options)
    assert found.absent["flat"] == "has no form for a mesh with replicas"
    assert found.absent["new"] == "needs python3.99 or later, which is neither on PATH nor among pyenv's versions"
    found = find_places({"other": wanted["other"]}, folder=None, is_here_only=False, **options)
    assert found.absent["other"].startswith("not installed; pip install hp-no-such-package")
    found = find_places({"other": wanted["other"]}, folder=tmp_path, is_here_only=True, **options)
    assert found.absent["other"] == "not in this interpreter"


def test_an_interpreter_that_does_not_start_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyenv puts a python3.12 on PATH that says "command not found" while its 3.12 is not chosen."""

    def program(path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    program(tmp_path / "shims" / "python3.99", "exit 127")
    chosen = program(tmp_path / "root" / "versions" / "3.99.1" / "bin" / "python3.99", f'exec {sys.executable} "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path / 'shims'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "root"))
    assert opt_places._base((3, 99)) == str(chosen)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "512"], "--only=512: is no case"),
        (["--replicas", "3"], "--replicas=3: does not divide the ranks"),
        (["--seconds", "0"], "--seconds=0.0: must be above 0"),
        (["--peers", "nobody"], "--peers=nobody: is not known"),
        (["--strategies", "magic"], "--strategies=magic: is not known"),
        (["--peer-python", "muonium"], "--peer-python=muonium: is no NAME=PYTHON"),
        (["--peers", "muonium", "--peer-python", "muonium=/gone"], "--peer-python=/gone: does not run"),
        (["--supernodes", "2", "--testbed", "gone"], "--testbed=gone: there is no such program"),
    ],
)
def test_wrong_options_name_themselves(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow  # starts two ranks, and computes until it is interrupted
def test_ctrl_c_is_answered_while_the_reference_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was, when the reference was done: of the large cases after minutes."""
    judge, began = Reference.judge, []

    def judged_with_a_signal(*arguments: Any) -> Verdict:
        began.append(time.monotonic())
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        return judge(*arguments)

    monkeypatch.setattr(Reference, "judge", judged_with_a_signal)
    options = ["--only", "[40,512,512]", "--ranks", "2", "--seconds", "0.1", "--strategies", REPLICATED]
    assert bench(*options, "--peers", "none", "--out", str(tmp_path)) == 130
    assert time.monotonic() - began[0] < 25
    assert not list(tmp_path.iterdir())
