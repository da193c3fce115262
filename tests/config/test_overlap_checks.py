from typing import Any

import pytest

from hp_muon_plugin.config.checks import check_train
from hp_muon_plugin.config.choices import ClipMode
from hp_muon_plugin.config.data_parallel import HpFsdp, TorchFsdp2
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.trainer import Topology, Train
from hp_muon_plugin.errors import ConfigError


def _check(dp: Any, optimizer: HpMuon, **topology: int) -> None:
    optimizer.overlap_backward = True
    check_train(Train(dp=dp, optimizer=optimizer, topology=Topology(**topology)), world_size=4)


@pytest.mark.parametrize(
    "options", [{"clip_grad": 0.0}, {"clip_mode": ClipMode.adamw_only}, {"clip_mode": ClipMode.none}]
)
def test_gradients_that_nothing_changes_may_be_sent_early(options: dict[str, Any]) -> None:
    _check(HpFsdp(), HpMuon(**options))


def test_clipping_is_refused_with_both_options_and_the_fix() -> None:
    with pytest.raises(ConfigError) as told:
        _check(HpFsdp(), HpMuon(clip_grad=2.5))
    assert str(told.value) == (
        "optimizer.overlap_backward=true: sends what is made of gradients before their norm is known, and "
        "optimizer.clip_grad=2.5 scales them by it\n  fix: set optimizer.clip_mode=adamw_only, which leaves Muon's "
        "gradients as they are, or optimizer.clip_grad=0"
    )


@pytest.mark.parametrize("dp", [None, TorchFsdp2()])
def test_wrappers_that_tell_nothing_are_refused(dp: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"true with dp=\w+: nothing tells there .*\n  fix: take dp=hp_fsdp or dp=hp_hsdp"
    ):
        _check(dp, HpMuon(clip_grad=0.0))


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_gradients_that_change_after_backward_are_refused(axis: str) -> None:
    with pytest.raises(ConfigError, match=rf"true with topology\.{axis}=2: .*\n  fix: .* or topology\.{axis}=1"):
        _check(HpFsdp(), HpMuon(clip_grad=0.0), **{axis: 2})
