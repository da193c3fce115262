"""Errors reach another process whole: torch.distributed.checkpoint and multiprocessing send them with pickle."""

import pickle

import pytest

from hp_muon_plugin import errors
from hp_muon_plugin.cli.script_config import _Composition

ONE = errors.ConfigError("topology.tp", 3, "does not divide 4", "choose 2")


@pytest.mark.parametrize("error", [ONE, errors.ConfigErrors([ONE, errors.ConfigError("a.b", None, "why", "fix")])])
def test_an_error_of_options_reads_the_same_elsewhere(error: Exception) -> None:
    """It ended with a TypeError on the rank that received it, and the message was lost."""
    received = pickle.loads(pickle.dumps(error))
    assert type(received) is type(error)
    assert str(received) == str(error)


def test_every_error_can_be_sent() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.HpMuonError)]
    plain = [kind for kind in kinds if kind not in (errors.ConfigError, errors.ConfigErrors)]
    assert len(plain) > 5
    for error in [*(kind("a message") for kind in plain), _Composition("optimizer.lr", "a message", "a fix")]:
        received = pickle.loads(pickle.dumps(error))
        assert type(received) is type(error)
        assert str(received) == str(error)


def test_the_parts_of_an_error_are_kept() -> None:
    received = pickle.loads(pickle.dumps(ONE))
    assert (received.option, received.why, received.fix) == (ONE.option, ONE.why, ONE.fix)
