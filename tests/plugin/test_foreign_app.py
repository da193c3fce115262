"""Somebody else's Hydra application, in a fresh environment with our wheel, gets ``optimizer=hp_muon``."""

import subprocess
import sys
import textwrap
import venv
from pathlib import Path

import pytest
from made_once import made_once

ROOT = Path(__file__).parents[2]
HYDRAS = ["1.3.2", "1.4.0rc3"]

APP = """
    import hydra, json
    from omegaconf import OmegaConf

    @hydra.main(config_path="conf", config_name="config", version_base=None)
    def main(cfg):
        print(json.dumps(OmegaConf.to_container(cfg, resolve=True)))

    main()
"""


def python_of(folder: Path) -> str:
    return str(folder / "bin" / "python")


def pip(folder: Path, *arguments: str) -> None:
    """Install into an environment without a pip of its own, which would take longer than all the rest."""
    command = [sys.executable, "-m", "pip", "--python", python_of(folder), "install", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def wheel() -> Path:
    """The wheel, built from a copy of what git would see."""

    def make(folder: Path) -> None:
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    (path,) = made_once("wheel", make).glob("*.whl")
    return path


@pytest.fixture(scope="session", params=HYDRAS)
def environment(request: pytest.FixtureRequest, wheel: Path) -> Path:
    def make(folder: Path) -> None:
        venv.create(folder, symlinks=True)
        pip(folder, f"hydra-core=={request.param}")
        pip(folder, "--no-deps", str(wheel))

    return made_once(f"hydra-{request.param}", make)


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """An application of somebody who has never heard of us."""
    conf = tmp_path / "conf"
    (conf / "optimizer").mkdir(parents=True)
    (conf / "config.yaml").write_text("defaults:\n  - optimizer: sgd\n  - _self_\nlr: 0.5\n")
    (conf / "optimizer" / "sgd.yaml").write_text("_target_: torch.optim.SGD\nlr: 0.1\n")
    (tmp_path / "app.py").write_text(textwrap.dedent(APP))
    return tmp_path


def run(environment: Path, app: Path, *overrides: str) -> "subprocess.CompletedProcess[str]":
    command = [python_of(environment), "-W", "ignore", "app.py", *overrides]
    return subprocess.run(command, capture_output=True, text=True, cwd=app, check=False)


def composed(environment: Path, app: Path, *overrides: str) -> dict[str, object]:
    import json

    done = run(environment, app, *overrides)
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.slow  # makes environments and installs into them
@pytest.mark.timeout(300)
class TestForeignApp:
    def test_hp_muon_replaces_the_application_s_optimizer(self, environment: Path, app: Path) -> None:
        optimizer = composed(environment, app, "optimizer=hp_muon", "optimizer.lr=0.02")["optimizer"]
        assert isinstance(optimizer, dict)
        assert optimizer["_target_"] == "hp_muon_plugin.muon.build_optimizer"
        assert (optimizer["lr"], optimizer["momentum"], optimizer["scale"]) == (0.02, 0.95, "match_rms_adamw")

    def test_the_application_s_own_choices_stay_first(self, environment: Path, app: Path) -> None:
        assert composed(environment, app)["optimizer"] == {"_target_": "torch.optim.SGD", "lr": 0.1}
        (app / "conf" / "optimizer" / "adamw.yaml").write_text("mine: true\n")
        assert composed(environment, app, "optimizer=adamw")["optimizer"] == {"mine": True}

    def test_another_group_is_reached_by_package(self, environment: Path, app: Path) -> None:
        config = composed(environment, app, "+optimizer@trainer.optim=hp_muon")
        assert config["trainer"]["optim"]["name"] == "hp_muon"  # type: ignore[index]

    def test_a_typing_error_is_named(self, environment: Path, app: Path) -> None:
        done = run(environment, app, "optimizer=hp_muon", "optimizer.momentm=0.3")
        assert done.returncode != 0
        assert "Key 'momentm' not in 'HpMuon'" in done.stderr

    def test_a_wrong_choice_lists_the_right_ones(self, environment: Path, app: Path) -> None:
        done = run(environment, app, "optimizer=hp_muon", "optimizer.scale=big")
        assert "expected one of [match_rms_adamw, spectral, shape_scaling, unit_rms, none]" in done.stderr

    def test_the_search_path_has_one_row_of_ours_and_no_torch_is_imported(self, environment: Path, app: Path) -> None:
        done = run(environment, app, "--info", "searchpath")
        assert sum("hp_muon_plugin" in line for line in done.stdout.splitlines()) == 1, done.stdout
        have = [python_of(environment), "-c", "import importlib.util as u; print(u.find_spec('torch'))"]
        assert subprocess.run(have, capture_output=True, text=True, check=True).stdout.strip() == "None"


def test_the_wheel_installs_two_packages_and_all_configs(wheel: Path) -> None:
    import zipfile

    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"hp_muon_plugin", "hydra_plugins"}
    for path in (ROOT / "conf").rglob("*.yaml"):
        assert f"hp_muon_plugin/conf/{path.relative_to(ROOT / 'conf')}" in names
    assert "hp_muon_plugin/py.typed" in names
    assert "hydra_plugins/__init__.py" not in names


TRAINS = """
    import os, sys
    import hydra

    @hydra.main(config_path="conf", config_name="config", version_base=None)
    def main(cfg):
        sys.path.append(os.environ["TORCH_IS_AT"])  # last: all else is of this environment
        import torch
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(20, 16), torch.nn.Flatten(), torch.nn.Linear(64, 20))
        optimizer = hydra.utils.instantiate(cfg.optimizer, params=model)
        by_name = hydra.utils.instantiate(cfg.optimizer, params=model.named_parameters())
        assert type(optimizer) is type(by_name)
        x = torch.randint(0, 20, (64, 4)); y = x[:, 2]
        losses = []
        for _ in range(40):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward(); optimizer.step(); losses.append(loss.item())
        assert losses[-1] < 0.5 * losses[0], losses
        print(hydra.__version__, type(optimizer).__name__, optimizer.num_orthogonalized)

    main()
"""


@pytest.mark.parametrize("has_group", [True, False])
def test_the_application_builds_the_optimizer_and_trains(
    environment: Path, app: Path, has_group: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a host does with the composed configuration; torch alone is of another environment, as it is large."""
    import torch

    monkeypatch.setenv("TORCH_IS_AT", str(Path(torch.__file__).parents[1]))
    (app / "app.py").write_text(textwrap.dedent(TRAINS))
    if not has_group:
        (app / "conf" / "config.yaml").write_text("lr: 0.5\n")
        (app / "conf" / "optimizer" / "sgd.yaml").unlink()
    done = run(environment, app, f"{'' if has_group else '+'}optimizer=hp_muon", "optimizer.lr=0.02")
    assert done.returncode == 0, done.stderr
    version, *told = done.stdout.split()
    assert told == ["HpMuonOptimizer", "40"]
    assert environment.name.startswith(f"hydra-{version[:3]}")
