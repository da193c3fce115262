"""Every number that a user can give has a range, and a value outside it never reaches a rank."""

import importlib
import inspect
import math
import pkgutil
import typing
from dataclasses import Field, fields, is_dataclass
from typing import Any

import pytest

import hp_muon_plugin.config
from hp_muon_plugin.config.checks import check_train
from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.config.ranges import Range, check_ranges, declared_range
from hp_muon_plugin.config.trainer import MLA, MoE, Train
from hp_muon_plugin.errors import ConfigError


def option_classes() -> list[type]:
    """All dataclasses of the package's modules, but the ranges themselves."""
    found = set()
    for module in pkgutil.iter_modules(hp_muon_plugin.config.__path__):
        loaded = importlib.import_module(f"hp_muon_plugin.config.{module.name}")
        found |= {item for item in vars(loaded).values() if inspect.isclass(item) and is_dataclass(item)}
    return sorted(found - {Range}, key=lambda cls: cls.__name__)


def is_number(hint: Any) -> bool:
    return hint in (int, float) or any(is_number(part) for part in typing.get_args(hint))


def numeric_options() -> list[tuple[type, "Field[Any]"]]:
    found = []
    for cls in option_classes():
        hints = typing.get_type_hints(cls)
        found += [(cls, option) for option in fields(cls) if is_number(hints[option.name])]
    return found


OPTIONS = numeric_options()


def test_the_options_are_found() -> None:
    names = {f"{cls.__name__}.{option.name}" for cls, option in OPTIONS}
    assert {"HpMuon.lr", "AdamW.betas", "MoE.shared_ffn_hidden_size", "Run.seed", "Topology.timeout_s"} <= names
    assert len(names) > 45


@pytest.mark.parametrize(("cls", "option"), OPTIONS, ids=lambda item: getattr(item, "name", None) or item.__name__)
def test_a_numeric_option_declares_its_range(cls: type, option: "Field[Any]") -> None:
    limits = declared_range(option)
    assert limits is not None, f"{cls.__name__}.{option.name}: use number(default, least=...) of config/ranges.py"
    assert (limits.least, limits.above) != (None, None) or option.name == "coefficients"
    assert limits.example is not None
    assert list(check_ranges(cls())) == []  # the default lies inside


def train_with_everything(optimizer: HpMuon | AdamW) -> Train:
    train = Train(optimizer=optimizer)
    train.model.moe, train.model.mla = MoE(), MLA()
    return train


def places(node: Any) -> list[tuple[Any, str]]:
    found = []
    for option in fields(node):
        value = getattr(node, option.name)
        if is_dataclass(value):
            found += places(value)
        elif declared_range(option) is not None:
            found.append((node, option.name))
    return found


@pytest.mark.parametrize("optimizer", [HpMuon, AdamW])
@pytest.mark.parametrize("wrong", [-1, -5, math.inf, -math.inf, math.nan, 1e300, 10**400])
def test_no_option_takes_a_value_that_is_never_right(optimizer: type[HpMuon] | type[AdamW], wrong: float) -> None:
    train = train_with_everything(optimizer())
    for node, name in places(train):
        if name == "coefficients":
            continue
        before = getattr(node, name)
        setattr(node, name, [wrong, wrong] if isinstance(before, list) else wrong)
        with pytest.raises(ConfigError) as caught:  # one error, and the checks that divide by it do not run
            check_train(train, world_size=1)
        assert caught.value.option.rpartition(".")[2] == name
        assert f"{caught.value.option}=" in caught.value.fix
        setattr(node, name, before)


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("run", "eval_batches", 0),
        ("run", "seed", 2**32),
        ("model", "vocab_multiple", 0),
        ("model", "init_std", 0.0),
        ("model", "ffn_hidden_size", 0),
        ("model", "rotary_base", 0),
        ("model", "rotary_base", 1),
        ("topology", "threads", 0),
        ("topology", "timeout_s", 0.0),
        ("optimizer", "lr", math.inf),
        ("optimizer", "steps", 0),
        ("optimizer", "coefficients", [[1.0, 2.0, math.nan]]),
    ],
)
def test_values_at_and_beyond_the_edge_are_named(group: str, name: str, value: Any) -> None:
    train = Train(optimizer=HpMuon())
    setattr(getattr(train, group), name, value)
    (error,) = check_ranges(train)
    assert error.option == f"{group}.{name}"


def test_the_fix_is_a_value_that_works() -> None:
    """`optimizer.lr=-1` suggested optimizer.lr=1, which diverges."""
    options = HpMuon(lr=-1.0)
    (error,) = check_ranges(options, "optimizer")
    assert str(error) == "optimizer.lr=-1: must be greater than 0\n  fix: e.g. optimizer.lr=0.005"
    options = HpMuon(lr=math.nan)
    (error,) = check_ranges(options, "optimizer")
    assert str(error) == "optimizer.lr=nan: must be finite and greater than 0\n  fix: e.g. optimizer.lr=0.005"
