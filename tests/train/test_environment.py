"""What torchrun says in the environment, and what somebody forgot to say."""

import pytest

from hp_muon_plugin.errors import ConfigError, ConfigErrors
from hp_muon_plugin.train.environment import Launch, check_environment, is_rank, speaks

WHOLE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def without(*names: str, **changes: str) -> dict[str, str]:
    return {name: value for name, value in (WHOLE | changes).items() if name not in names}


def test_what_torchrun_says_is_accepted() -> None:
    check_environment(WHOLE)
    check_environment(without("LOCAL_RANK"))
    check_environment(without("MASTER_ADDR", "MASTER_PORT", HP_MUON_INIT_METHOD="file:///x"))


@pytest.mark.parametrize(
    ("variables", "option"),
    [
        (without("WORLD_SIZE"), "WORLD_SIZE"),
        (without(RANK="x"), "RANK"),
        (without(RANK="-1"), "RANK"),
        (without(RANK=""), "RANK"),
        (without(RANK="2"), "RANK"),
        (without(WORLD_SIZE="two"), "WORLD_SIZE"),
        (without(WORLD_SIZE="0", RANK="0"), "RANK"),
        (without(LOCAL_RANK="a"), "LOCAL_RANK"),
        (without("MASTER_ADDR"), "MASTER_ADDR"),
        (without("MASTER_PORT"), "MASTER_PORT"),
        (without(MASTER_PORT="x"), "MASTER_PORT"),
    ],
)
def test_what_is_missing_or_wrong_is_named_with_the_fix(variables: dict[str, str], option: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_environment(variables)
    assert caught.value.option == option
    assert "torchrun" in caught.value.fix
    assert "unset RANK" in caught.value.fix


def test_all_that_is_missing_is_named_at_once() -> None:
    with pytest.raises(ConfigErrors) as caught:
        check_environment({"RANK": "0"})
    assert [error.option for error in caught.value.errors] == ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]


@pytest.mark.parametrize(("rank", "answer"), [(None, True), ("0", True), ("x", True), ("", True), ("1", False)])
def test_one_process_speaks_for_the_job(rank: str | None, answer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With RANK=x nothing was printed at all."""
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    assert speaks() is answer
    assert is_rank() is (rank is not None)


def test_the_place_of_a_rank_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in WHOLE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HP_MUON_INIT_METHOD", raising=False)
    assert Launch.from_environment() == Launch(1, 2, 1, "env://")
