"""``hp-muon bench optimizer`` says what memory it needs, and leaves out what would not fit instead of being killed."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hp_muon_plugin.bench import opt_memory
from hp_muon_plugin.bench.opt_cases import parse_case
from hp_muon_plugin.bench.opt_contenders import OURS, Peer
from hp_muon_plugin.bench.opt_lane import Job, Lane
from hp_muon_plugin.bench.opt_memory import GIB, contender_bytes, free_bytes, lacking
from hp_muon_plugin.bench.opt_naive import NAIVE
from hp_muon_plugin.bench.opt_naive import PEERS as NAIVE_PEERS
from hp_muon_plugin.bench.opt_ours import CONVENTION, REPLICATED, copies_of
from hp_muon_plugin.bench.opt_places import Places
from hp_muon_plugin.bench.opt_race import Entrant, race
from hp_muon_plugin.bench.optimizer import Field, check_memory, expected_bytes, rows, run_cases
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.train.launch import Stop

# they start ranks of several environments one after another: a slow, busy machine took over 120 s for some
pytestmark = pytest.mark.timeout(300)

NAME = f"{OURS} {REPLICATED}"
JOB = Job(2, 1, 60.0, Stop())
CASES = [parse_case(text, "x") for text in ("8x12", "4x64x64")]


def field(*peers: str, named: dict[str, Peer] = NAIVE_PEERS) -> Field:
    return Field((REPLICATED,), {name: named[name] for name in peers}, Places(dict.fromkeys(peers, sys.executable)))


def test_what_is_free_is_less_than_there_is() -> None:
    lines = Path("/proc/meminfo").read_text().splitlines()
    total = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))
    free = free_bytes()
    assert free is not None
    assert 0 < free < total


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 600\ninactive_file 50\n"}, 350),
        ({"memory.max": "max", "memory.current": "700", "memory.stat": ""}, None),
        (
            {
                "memory.limit_in_bytes": "1000",
                "memory.usage_in_bytes": "900",
                "memory.stat": "inactive_file 1\ntotal_inactive_file 30\n",
            },
            130,
        ),
        ({}, None),
    ],
)
def test_a_control_groups_limit_counts(files: dict[str, str], left: int | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert opt_memory._left(tmp_path) == left


def test_what_is_expected_grows_with_contenders_ranks_and_environments() -> None:
    small, large = (CASES[number].text for number in range(2))
    alone = expected_bytes(CASES, field(), JOB)
    assert alone[large] > alone[small] > 2 * opt_memory.RANK_BYTES
    both = expected_bytes(CASES, field(NAIVE), JOB)
    added = contender_bytes(CASES[1], NAIVE_PEERS[NAIVE].copies, 2)
    assert both[large] - alone[large] == added == 4 * 4 * 64 * 64 * 2.5 * 2
    apart = {NAIVE: replace(NAIVE_PEERS[NAIVE], environment={"A": "1"})}
    assert expected_bytes(CASES, field(NAIVE, named=apart), JOB)[large] == both[large] + 2 * opt_memory.RANK_BYTES
    assert expected_bytes(CASES, field(), replace(JOB, num_ranks=4))[large] > alone[large]
    assert copies_of(NAME) == copies_of("ours allgather_dedup (hp)") > copies_of("ours auto (hp)")


def test_the_start_tells_what_is_needed_and_refuses_what_cannot_be() -> None:
    found = field(NAIVE)
    (line,) = check_memory(CASES, found, JOB, lambda: 64 * GIB)
    assert line.startswith("memory: 4x64x64 is expected to need about ")
    assert line.endswith(" GiB, 64.0 GiB are free")
    (line,) = check_memory(CASES, found, JOB, lambda: None)
    assert "does not tell" in line
    needed = expected_bytes(CASES, field(), JOB)["4x64x64"]
    (line,) = check_memory(CASES, found, JOB, lambda: needed + GIB)
    assert "who finds no room when it is built is left out and named" in line
    with pytest.raises(ConfigError, match=r"--strategies=replicated: in 4x64x64 on 2 ranks ours need about .* free\n"):
        check_memory(CASES, found, JOB, lambda: needed + GIB - 1)


def test_who_finds_no_room_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    """The system ended such a run, and everything that had been found was lost."""
    with Stop() as stop:
        lane = Lane(sys.executable, Job(1, 1, 60.0, stop), tmp_path / "lane")
        lane.start()
        try:
            entrants = {"huge": Entrant(lane, CONVENTION, 1e15), NAME: Entrant(lane, CONVENTION)}
            result = race(parse_case("4x6", "x"), entrants, lane, tmp_path, seconds=0.0)
        finally:
            lane.stop()
    assert result.failed["huge"].startswith("left out: needs about ")
    assert "--peers" in result.failed["huge"]
    assert result.found[NAME].verdict.is_right


@pytest.mark.slow  # starts ranks of two environments, twice
def test_ranks_live_for_one_case(tmp_path: Path) -> None:
    """Those of all environments stayed until the last case had been measured, with what they had not given back."""
    away = {NAIVE: replace(NAIVE_PEERS[NAIVE], environment={"A": "1"}), "gone": NAIVE_PEERS[NAIVE]}
    found = Field((REPLICATED,), away, Places({NAIVE: sys.executable, "gone": "/bin/false"}))
    with Stop() as stop:
        job = Job(1, 1, 60.0, stop)
        results = run_cases(CASES, found, job, tmp_path, seconds=0.0)
    assert sorted(path.name for path in (tmp_path / "lane0").iterdir()) == ["1", "2"]
    assert sorted(path.name for path in (tmp_path / "lane1").iterdir()) == ["1", "2"]
    for result in results:
        assert set(result.found) == {NAME, NAIVE}
        assert result.failed["gone"].startswith("a rank ended")
        (wall, _) = rows(result, found, job)
        assert "FAILED gone" in wall.notes


def test_what_nobody_knows_is_not_in_the_way() -> None:
    assert lacking(10**18, lambda: None) is None
    assert lacking(GIB, lambda: 2 * GIB) is None
    assert "needs about 1.0 GiB of memory, and 1.5 GiB are free" in (lacking(GIB, lambda: 3 * GIB // 2) or "")
