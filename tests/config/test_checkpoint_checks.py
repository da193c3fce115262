"""Options of checkpoints that contradict each other."""

import pytest

from hp_muon_plugin.config.checkpoint_checks import checkpoint_errors
from hp_muon_plugin.config.trainer import Checkpoint


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (Checkpoint(keep=2), "checkpoint.keep"),
        (Checkpoint(asynchronous=True), "checkpoint.asynchronous"),
        (Checkpoint(on_interrupt=True), "checkpoint.on_interrupt"),
        (Checkpoint(load_optimizer=False), "checkpoint.load_optimizer"),
        (Checkpoint(load_position=False, every=2), "checkpoint.load_position"),
        (Checkpoint(resume=" "), "checkpoint.resume"),
        (Checkpoint(save="", every=2), "checkpoint.save"),
    ],
)
def test_what_would_have_no_effect_is_refused(options: Checkpoint, name: str) -> None:
    assert [error.option for error in checkpoint_errors(options)] == [name]


@pytest.mark.parametrize(
    "options",
    [
        Checkpoint(),
        Checkpoint(every=10, keep=2, asynchronous=True, on_interrupt=True, resume="auto"),
        Checkpoint(save="x", keep=2, asynchronous=True, on_interrupt=True),
        Checkpoint(resume="x", load_optimizer=False, load_random=False, load_position=False),
    ],
)
def test_what_belongs_together_is_accepted(options: Checkpoint) -> None:
    assert not list(checkpoint_errors(options))
