"""Commands that are started without standard input, output or error."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from cli.commands import CLI, TINY


def _run(closed: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", *CLI, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=100, check=False)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_file_is_no_failure(closed: str, tmp_path: Path) -> None:
    """Without standard output every command ended with an AttributeError."""
    done = _run(closed, "--version", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert bool(done.stdout) == (">&-" not in closed.replace("2>&-", ""))
    refused = _run(closed, "train", "topology.ranks=0", folder=tmp_path)
    assert refused.returncode == 2
    assert ("topology.ranks=0" in refused.stderr) == ("2>&-" not in closed)


@pytest.mark.parametrize(
    ("arguments", "redirected"),
    [
        (["plan", "-m", "model=tiny_dense,tiny_moe"], "| true"),
        (["train", "topology.ranks=0"], "2>&1 >&2 | true"),
        (["plan", "-m", "model=tiny_dense,tiny_moe"], "2>&1 | true"),
    ],
)
def test_what_nobody_reads_is_no_traceback(arguments: list[str], redirected: str, tmp_path: Path) -> None:
    """Hydra's log of a sweep showed one."""
    command = ["bash", "-c", f'(sleep 0.2; exec "$@") {redirected}; exit ${{PIPESTATUS[0]}}', "sh", *CLI, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow  # starts two real ranks
@pytest.mark.parametrize("start", ["auto", "fresh"])
def test_ranks_of_a_command_without_files_train(start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their pipes and logs had the numbers of what was closed."""
    monkeypatch.setitem(os.environ, "HP_MUON_START", start)
    done = _run("<&- >&- 2>&-", "train", *TINY, "run.steps=2", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    lines = (tmp_path / "outputs" / "train" / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line)["step"] for line in lines) == 2
