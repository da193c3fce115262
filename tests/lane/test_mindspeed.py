"""Hooks and scripts beside a package that patches Megatron as MindSpeed does (mindspeed_like)."""

import importlib
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dist_pool import run_ranks

from hp_muon_plugin.config.trainer import Topology
from hp_muon_plugin.errors import HookError
from hp_muon_plugin.megatron import install, uninstall
from hp_muon_plugin.platform import mindspeed
from hp_muon_plugin.train.adaptor import megatron_arguments
from hp_muon_plugin.train.setup import Launch
from lane.harness import moe, optimizer_config, train_config, wrapped_model
from lane.script_runs import MOCK, SCRIPT, script, shared_script

LIKE = str(Path(__file__).parent / "mindspeed_like")
OURS = "HpMuonMegatronOptimizer"


def _adaptor(name: str = mindspeed.ADAPTOR) -> Any:
    if LIKE not in sys.path:
        sys.path.insert(0, LIKE)
    return importlib.import_module(name)


def _built(model: Any, name: str = "hp_muon") -> str:
    """What Megatron's factory makes, and that MindSpeed's wrapper saw it pass."""
    from megatron.core import optimizer
    from mindspeed.features import BUILT  # type: ignore[import-not-found]

    made = optimizer.get_megatron_optimizer(optimizer_config(name), [model])
    assert BUILT[-1] is made
    return type(made).__name__


def _install() -> None:
    install()


def _by_name() -> None:
    """A trainer that imports the factory by its name."""
    from megatron.core.optimizer import get_megatron_optimizer

    sys.modules["some_trainer"] = trainer = types.ModuleType("some_trainer")
    trainer.get_megatron_optimizer = trainer.build = get_megatron_optimizer  # type: ignore[attr-defined]


def _repatch() -> None:
    _adaptor("mindspeed.features").repatch({"swap_attention": True})


ORDERS: dict[str, list[Callable[[], Any]]] = {
    "hooks first": [_install, _adaptor, _repatch],
    "hooks last": [_adaptor, _by_name, _install, _repatch],
    "mindspeed_llm last": [_adaptor, _install, lambda: _adaptor("mindspeed_llm")],
    "mindspeed_llm first": [lambda: _adaptor("mindspeed_llm"), _by_name, _install, _repatch],
}


def _in_order(launch: Launch, order: str) -> list[str]:
    model = wrapped_model(launch)
    for step in ORDERS[order]:
        step()
    found = [_built(model), _built(model, "adam")]
    trainer: Any = sys.modules.get("some_trainer")
    if trainer is not None:
        found += [
            type(build(optimizer_config(), [model])).__name__
            for build in (trainer.get_megatron_optimizer, trainer.build)
        ]
    return found


@pytest.mark.parametrize("order", ORDERS)
def test_the_plugins_optimizer_is_built_below_mindspeeds_wrappers_in_any_order(order: str) -> None:
    ours, other, *by_name = run_ranks(1, _in_order, order)[0]
    assert ours == OURS
    assert other != OURS
    assert by_name in ([], [OURS, OURS])


def _wrapped_by_a_trainer(launch: Launch) -> str:
    """A feature that wraps the copy of a trainer, and so has MindSpeed's own wrapper for its original."""
    model = wrapped_model(launch)
    _adaptor()
    _by_name()
    from mindspeed.patch_utils import MindSpeedPatchesManager as Manager  # type: ignore[import-not-found]

    def tft_wrapper(function: Any) -> Any:
        return lambda *args, **kwargs: function(*args, **kwargs)

    Manager.register_patch("some_trainer.get_megatron_optimizer", tft_wrapper)
    Manager.apply_patches()
    install()
    trainer: Any = sys.modules["some_trainer"]
    return type(trainer.get_megatron_optimizer(optimizer_config(), [model])).__name__


def test_wrappers_that_stand_on_wrappers_reach_the_plugin() -> None:
    assert run_ranks(1, _wrapped_by_a_trainer) == [OURS]


def _given_back(launch: Launch) -> list[Any]:
    """Taken back while patches are on, while they are off, and where the hook was there before them."""
    from megatron.core import optimizer

    original = optimizer.get_megatron_optimizer
    model = wrapped_model(launch)
    _adaptor()
    from mindspeed.patch_utils import MindSpeedPatchesManager as Manager

    found: list[Any] = []
    install()
    assert "below MindSpeed's get_megatron_optimizer_wrapper" in str(install())
    uninstall()
    found.append(_built(model, "adam"))
    Manager.remove_patches()
    found.append(optimizer.get_megatron_optimizer is original)
    _repatch()
    install()
    Manager.remove_patches()
    uninstall()
    found.append(optimizer.get_megatron_optimizer is original)
    install()
    _repatch()
    uninstall()
    found.append(_built(model, "adam"))
    Manager.remove_patches()
    return [*found, optimizer.get_megatron_optimizer is original]


def test_uninstall_gives_back_what_mindspeed_stands_on() -> None:
    first, off, while_off, inner, last = run_ranks(1, _given_back)[0]
    assert OURS not in (first, inner)
    assert (off, while_off, last) == (True, True, True)


def _beside_its_muon(launch: Launch) -> str:
    _adaptor("mindspeed.args_utils").get_mindspeed_args().optimizer = "muon"
    _adaptor()
    try:
        install()
    except HookError as error:
        return str(error)
    return ""


def test_mindspeeds_own_muon_is_refused() -> None:
    message = run_ranks(1, _beside_its_muon)[0]
    assert "get_megatron_optimizer_muon_wrapper, another Muon" in message
    assert "leave --optimizer muon out" in message


def _our_trainer(launch: Launch) -> Any:
    """What MindSpeed reads where the command line is Hydra's, and what it leaves of that."""
    sys.path.insert(0, LIKE)
    sys.argv = line = ["hp-muon", "train", "model.moe=null", "--optimizer", "muon"]
    config = train_config(moe(), topology=Topology(ep=2, tp=1))
    mindspeed.adapt(megatron_arguments(config))
    read = _adaptor("mindspeed.args_utils").get_mindspeed_args()
    model = wrapped_model(launch)
    install()
    return vars(read), sys.argv is line, _built(model), config.model


def test_mindspeed_reads_our_trainers_options_as_megatrons_arguments() -> None:
    read, is_kept, built, model = run_ranks(1, _our_trainer)[0]
    assert (is_kept, built) == (True, OURS)
    assert (read["optimizer"], read["hidden_size"], read["num_experts"]) == ("adam", model.hidden_size, 4)
    assert (read["expert_model_parallel_size"], read["moe_grouped_gemm"], read["bf16"]) == (2, False, False)


_TRAINS = """
import sys
assert "megatron.core" not in sys.modules
import torch
{first}
from mindspeed.args_utils import get_mindspeed_args
from hp_muon_plugin.train.adaptor import megatron_arguments
from hp_muon_plugin.train.setup import Launch
from lane.harness import optimizer_config, wrapped_model
from megatron.core.optimizer import get_megatron_optimizer
from mindspeed.features import BUILT
model = wrapped_model(Launch(0, 1, 0, "file://" + sys.argv[1]))
{last}
made = get_megatron_optimizer(optimizer_config("adam"), [model])
assert BUILT[-1] is made
read = get_mindspeed_args()
print("made", type(made).__name__, type(model).__name__, "for", read.lr, read.optimizer, sys.argv[2:])
"""


def _script(tmp_path: Path, *arguments: str, first: str = "", last: str = "") -> "subprocess.CompletedProcess[str]":
    path = tmp_path / "train.py"
    path.write_text(_TRAINS.format(first=first, last=last), encoding="utf-8")
    command = [sys.executable, "-m", "hp_muon_plugin.run", str(path), str(tmp_path / "store"), *arguments]
    places = [LIKE, str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)


@pytest.mark.once  # a process of its own; the order is that of every version
def test_a_script_of_mindspeed_llm_gets_the_plugin_when_its_adaptor_has_patched(tmp_path: Path) -> None:
    """The adaptor finds Megatron unimported, and on the command line what the plugin added to it."""
    ran = _script(
        tmp_path, "--hp-dp", "hp_fsdp", "--", "optimizer.lr=0.005", first="from mindspeed_llm import megatron_adaptor"
    )
    assert ran.returncode == 0, ran.stderr
    assert (
        "made ShardedMegatronOptimizer HpFsdpModel for 0.005 adam ['--optimizer', 'adam', '--lr', '0.005'" in ran.stdout
    )
    assert "below MindSpeed's get_megatron_optimizer_wrapper" in ran.stdout + ran.stderr


@pytest.mark.once  # a process of its own; the order is that of every version
def test_a_script_that_imports_megatron_before_mindspeed_is_stopped(tmp_path: Path) -> None:
    ran = _script(tmp_path, first="import megatron.core\nimport mindspeed.megatron_adaptor")
    assert ran.returncode == 2
    assert "imports Megatron before MindSpeed's adaptor" in ran.stderr + ran.stdout
    assert "Traceback" not in ran.stderr


def test_the_way_from_a_script_to_mindspeed_does_not_change_what_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through upstream's own pretrain(): wrapped by MindSpeed or not, the same losses."""
    path = tmp_path / "pretrain.py"
    lines = (
        "from mindspeed_llm import megatron_adaptor",
        "import mindspeed.features, runpy",
        f"runpy.run_path({SCRIPT!r}, run_name='__main__')",
        "print('through the wrapper:', *(type(made).__name__ for made in mindspeed.features.BUILT))",
    )
    path.write_text("\n".join(lines), encoding="utf-8")
    plain = shared_script(2, *MOCK, "--hp-dp", "hp_fsdp")
    monkeypatch.syspath_prepend(LIKE)
    patched = script(2, *MOCK, "--hp-dp", "hp_fsdp", path=str(path))
    assert "through the wrapper: ShardedMegatronOptimizer\n" in patched.text
    assert (patched.code, patched.losses, patched.norms) == (0, plain.losses, plain.norms)
    assert patched.validation == plain.validation
