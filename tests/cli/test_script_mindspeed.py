"""Arguments of MindSpeed that do not go with the plugin, and packages of its name."""

import sys
import types
from pathlib import Path

import pytest

from hp_muon_plugin.cli.script_args import parse
from hp_muon_plugin.cli.script_config import composed_choice
from hp_muon_plugin.cli.script_line import script_line
from hp_muon_plugin.config.choices import PlatformName
from hp_muon_plugin.config.mindspeed import CLASHES, Clash
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.platform import mindspeed


def _line(arguments: list[str], *options: str) -> list[str]:
    choice = composed_choice(parse(["train.py", *options]))
    return script_line(arguments, choice, PlatformName.npu)[0]


@pytest.mark.parametrize("clash", CLASHES, ids=lambda clash: clash.flag)
def test_what_changes_megatrons_optimizers_or_passes_is_refused_with_the_flag(clash: Clash) -> None:
    given = [clash.flag, *([clash.value] if clash.value else [])]
    with pytest.raises(ConfigError) as caught:
        _line(given, "--hp-dp", "hp_fsdp")
    assert (caught.value.option, caught.value.value) == (clash.flag, clash.value or True)
    if clash.sharded_only:
        assert _line(given)[: len(given)] == given
    else:
        with pytest.raises(ConfigError, match=clash.why):
            _line(given)
    assert _line(given, "--", "optimizer=adamw")[: len(given)] == given


def test_other_values_of_an_option_and_other_options_pass() -> None:
    given = ["--optimizer-selection", "fused_torch_adamw", "--moe-grouped-gemm", "--use-fused-rmsnorm"]
    assert _line(given, "--hp-dp", "hp_fsdp")[: len(given)] == given


def test_a_package_that_only_bears_the_name_is_no_mindspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is such a one on PyPI."""
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not mindspeed.is_installed()
    (tmp_path / "mindspeed").mkdir()
    (tmp_path / "mindspeed" / "__init__.py").touch()
    assert not mindspeed.is_installed()
    (tmp_path / "mindspeed" / "patch_utils.py").touch()
    assert mindspeed.is_installed()
    assert "mindspeed" not in sys.modules


def test_a_package_that_mindspeed_made_up_is_told_from_a_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up, real = types.ModuleType("made_up"), types.ModuleType("real")
    made_up.__file__, real.__file__ = "mindspeed.dummy_module.py", "site-packages/real/__init__.py"
    monkeypatch.setitem(sys.modules, "made_up", made_up)
    monkeypatch.setitem(sys.modules, "real", real)
    assert [mindspeed.is_dummy(name) for name in ("made_up", "real", "absent")] == [True, False, False]
