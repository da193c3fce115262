"""Options of a dataclass as command-line flags in Megatron's style: ``adamw.lr`` of HpMuon is ``--hp-muon-adamw-lr``.

Names, choices, defaults and descriptions are read from the dataclass, so that a new option is a flag at once.
"""

import argparse
import ast
import inspect
import textwrap
import types
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

_NO_OPTIONS = ("_target_", "name")  # what a host instantiates, and what chooses the dataclass itself


@dataclass(frozen=True, slots=True)
class Flag:
    """One option as a flag.

    Attributes:
        name: As it is written, for example ``--hp-muon-adamw-lr``.
        path: Dotted name of the option, for example ``optimizer.adamw.lr``.
        kinds: Types of its values, None aside.
        is_optional: Whether it may be null.
        default: Its default.
        text: What it means.
    """

    name: str
    path: str
    kinds: tuple[Any, ...]
    is_optional: bool
    default: Any
    text: str

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value: ``--hp-muon-nesterov`` and ``--no-hp-muon-nesterov``."""
        return self.kinds == (bool,)

    @property
    def num_values(self) -> int | None:
        """Values that follow it; None for one or more."""
        if self.is_switch:
            return 0
        return None if self._is_list else 1

    @property
    def names(self) -> tuple[str, ...]:
        """All ways to write it."""
        return (self.name, f"--no-{self.name.removeprefix('--')}") if self.is_switch else (self.name,)

    @property
    def _is_list(self) -> bool:
        return get_origin(self.kinds[0]) is list and get_origin(get_args(self.kinds[0])[0]) is not list

    @property
    def _choices(self) -> list[str] | None:
        if not (isinstance(self.kinds[0], type) and issubclass(self.kinds[0], Enum)):
            return None
        return [*(member.name for member in self.kinds[0]), *(["null"] if self.is_optional else [])]

    def add_to(self, group: Any) -> None:
        """Add it to a parser.

        Args:
            group: An argparse parser or group of arguments.
        """
        words = self.text.replace("``", "").replace("%", "%%")
        default = "null" if self.default is None else str(self.default).replace("%", "%%")
        common: dict[str, Any] = {
            "dest": self.path,
            "default": argparse.SUPPRESS,
            "help": f"{words} (default: {default})",
        }
        if self.is_switch:
            group.add_argument(self.name, action=argparse.BooleanOptionalAction, **common)
            return
        choices = self._choices
        common["metavar"] = "{" + ",".join(choices) + "}" if choices else self.path.rpartition(".")[2].upper()
        group.add_argument(self.name, nargs="+" if self._is_list else None, **common)

    def value(self, given: Any) -> Any:
        """A parsed value, as OmegaConf takes it and checks its type.

        Args:
            given: What argparse read: a text, texts or a truth value.

        Returns:
            Numbers, lists and null as such; names of choices and plain texts as they stand.
        """
        if isinstance(given, bool):
            return given
        if isinstance(given, list):
            return given if str in get_args(self.kinds[0]) else [_read(text) for text in given]
        return given if self.kinds == (str,) and not (self.is_optional and given == "null") else _read(given)


def _read(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def flags_of(options: type, *, prefix: str, path: str) -> tuple[Flag, ...]:
    """The options of a dataclass and of those nested in it.

    Args:
        options: The dataclass.
        prefix: With which every flag begins, for example ``--hp-muon``.
        path: Where the dataclass stands in the configuration, for example ``optimizer``.

    Returns:
        Flags in the order of the fields.
    """
    return tuple(_flags(options, prefix, path))


def _flags(options: type, prefix: str, path: str) -> Iterator[Flag]:
    assert is_dataclass(options), options
    hints, texts = get_type_hints(options), _descriptions(options)
    for option in fields(options):
        if option.name in _NO_OPTIONS:
            continue
        name, below = f"{prefix}-{option.name.replace('_', '-')}", f"{path}.{option.name}"
        kinds = _kinds(hints[option.name])
        if isinstance(kinds[0], type) and is_dataclass(kinds[0]):
            yield from _flags(kinds[0], name, below)
        else:
            is_optional = type(None) in get_args(hints[option.name])
            yield Flag(name, below, kinds, is_optional, _default(option), texts.get(option.name, ""))


def _kinds(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(kind for kind in get_args(hint) if kind is not type(None))
    return (hint,)


def _default(option: "Field[Any]") -> Any:
    if option.default is not MISSING:
        return option.default
    assert option.default_factory is not MISSING, option
    return option.default_factory()


def _descriptions(options: type) -> dict[str, str]:
    """The texts under the fields, which Python itself does not keep."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(options)))
    except OSError:  # no source at hand, as in a zipped installation
        return {}
    body, found = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else [], {}
    for before, after in zip(body, body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and isinstance(after, ast.Expr):
            text = after.value.value if isinstance(after.value, ast.Constant) else ""
            found[before.target.id] = " ".join(str(text).split())
    return found
