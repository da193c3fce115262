import subprocess
import sys

import pytest


@pytest.mark.slow  # imports megatron-core in a process of its own
def test_doctor_lists_versions_platforms_and_hooks() -> None:
    pytest.importorskip("megatron.core")
    command = [sys.executable, "-W", "ignore", "-m", "hp_muon_plugin.cli.main", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "megatron-core" in done.stdout
    assert "auto takes           cpu with gloo" in done.stdout
    assert "optimizer      factory at megatron.core.optimizer.get_megatron_optimizer" in done.stdout
    assert "no problems found" in done.stdout


def test_doctor_without_megatron_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    from hp_muon_plugin.cli import doctor

    real = metadata.version

    def version(name: str) -> str:
        if name == "megatron-core":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    assert any("pip install 'hp_muon_plugin[megatron]'" in problem for problem in doctor._hook_lines())


def test_doctor_takes_no_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    from hp_muon_plugin.cli.doctor import run

    assert run(["--verbose"]) == 2
    assert "takes no arguments" in capsys.readouterr().err
