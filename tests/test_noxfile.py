"""How the test run finds interpreters for its lanes, and says which lane has none."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("nox", reason="only the main environment runs nox")


@pytest.fixture
def noxfile(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # which the file removes: put back afterwards
    found = importlib.util.spec_from_file_location("noxfile_read", Path(__file__).parents[1] / "noxfile.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def _put(folder: Path, name: str, script: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="ascii")
    path.chmod(0o755)
    return str(path)


def test_an_interpreter_counts_if_it_starts_and_is_of_that_version(
    noxfile: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert noxfile.interpreter((running,)) == sys.executable
    assert noxfile.interpreter(("9.7",)) is None
    _put(tmp_path, "python9.7", "exit 127")  # as pyenv's shim of a version that is not there
    assert noxfile.interpreter(("9.7",)) is None
    right = _put(tmp_path, "python9.8", "echo 9.8")
    assert noxfile.interpreter(("9.7", "9.8")) == right


def test_a_lane_without_interpreter_is_named_in_the_summary(
    noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noxfile, "installed_lane", lambda: "0.16.1")
    monkeypatch.setattr(noxfile, "interpreter", lambda versions: "python" if "3.12" in versions else None)
    assert noxfile.apart() == {"0.19.2": "python"}
    noxfile.RESULTS.clear()
    noxfile.register_lanes()
    assert noxfile.RESULTS == ["lane megatron-core 0.12.1: not run, no Python 3.11 found"]
