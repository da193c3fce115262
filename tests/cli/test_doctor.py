import os
import subprocess
import sys

import pytest

DOCTOR = [sys.executable, "-m", "hp_muon_plugin.cli.main", "doctor"]


@pytest.mark.slow  # imports megatron-core in a process of its own
def test_doctor_lists_versions_platforms_and_hooks() -> None:
    pytest.importorskip("megatron.core")
    done = subprocess.run(DOCTOR, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""  # megatron-core's warnings of what is not installed are not about us
    assert "megatron-core" in done.stdout
    assert "auto takes           cpu with gloo" in done.stdout
    assert "optimizer      factory at megatron.core.optimizer.get_megatron_optimizer" in done.stdout
    assert "no problems found" in done.stdout


def test_doctor_without_megatron_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    from hp_muon_plugin.cli import doctor
    from hp_muon_plugin.megatron import versions

    real = metadata.version

    def version(name: str) -> str:
        if name == "megatron-core":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(versions, "_installed", versions._installed.__wrapped__)  # what was read before is kept
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    assert any("pip install 'hp_muon_plugin[megatron]'" in problem for problem in doctor._hook_lines())


def test_doctor_takes_no_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    from hp_muon_plugin.cli.doctor import run

    assert run(["--verbose"]) == 2
    assert "takes no arguments" in capsys.readouterr().err


@pytest.mark.slow  # imports megatron-core in a process of its own
@pytest.mark.parametrize("value", ["nonsense", "guard"])
def test_doctor_sees_a_variable_that_no_run_could_train_with(value: str) -> None:
    pytest.importorskip("megatron.core")
    environment = {**os.environ, "HP_MUON_HOOKS": value}
    done = subprocess.run(DOCTOR, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert "no problems" not in done.stdout
    assert f"HP_MUON_HOOKS={value}: " in done.stdout.partition("problems\n")[2]


@pytest.mark.slow  # imports megatron-core in a process of its own
def test_doctor_may_lose_its_reader() -> None:
    """As in `hp-muon doctor | head -1`: it ended with a traceback."""
    process = subprocess.Popen(DOCTOR, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 141  # as if SIGPIPE had ended it


def test_doctor_says_what_a_run_does_without_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    from hp_muon_plugin.cli import doctor

    assert doctor._notes() == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert ["pip install 'hp_muon_plugin[log]'" in note for note in doctor._notes()] == [True]
