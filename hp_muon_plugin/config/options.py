"""From dictionaries to the typed options, with errors that name the option and the nearest right one."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from hp_muon_plugin.errors import ConfigError

Options = TypeVar("Options")


def from_options(cls: type[Options], options: Mapping[str, Any] | DictConfig, *, prefix: str) -> Options:
    """Make typed options from a mapping.

    Args:
        cls: A dataclass of this package.
        options: Values by name; nested mappings for nested options. Missing ones get the default.
        prefix: What stands before the names in messages, for example ``optimizer``.

    Returns:
        An instance of ``cls``.

    Raises:
        ConfigError: If it is no mapping, a name is unknown or a value has the wrong type.
    """
    if not isinstance(options, Mapping | DictConfig):
        raise ConfigError(prefix, options, "is no mapping of options", "as in {'name': value}, or {} for the defaults")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(cls), OmegaConf.create(plain(options)))
        return cast(Options, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise _explain(cls, error, prefix) from error


def nearest(name: str, names: Sequence[str]) -> str | None:
    """The name that a typing error most likely meant.

    Args:
        name: What was written.
        names: What exists.

    Returns:
        The nearest name, or None if nothing is near.
    """
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return found[0] if found else None


def plain(options: Mapping[str, Any] | DictConfig) -> dict[str, Any]:
    """Nested mappings as dictionaries of their own.

    Args:
        options: Values by name; OmegaConf's are resolved.

    Returns:
        A copy that shares no container with ``options``.
    """
    if isinstance(options, DictConfig):
        return cast(dict[str, Any], OmegaConf.to_container(options, resolve=True))
    return {str(key): plain(value) if isinstance(value, Mapping) else value for key, value in options.items()}


def overlay(base: Mapping[str, Any], given: Mapping[str, Any] | DictConfig) -> dict[str, Any]:
    """Options of ``base``, overruled one by one by those of ``given``, nested ones too.

    Args:
        base: Values by name.
        given: Values by name.

    Returns:
        A new dictionary.
    """
    merged = plain(base)
    for key, value in plain(given).items():
        below = merged.get(key)
        merged[key] = overlay(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _explain(cls: type, error: OmegaConfBaseException, prefix: str) -> ConfigError:
    key = str(error.full_key or error.key or "")
    option = ".".join(piece for piece in (prefix, key) if piece)
    message = str(error.msg or error).splitlines()[0]
    if isinstance(error, ConfigKeyError):
        names = [field.name for field in fields(cls)]
        guess = nearest(key.rpartition(".")[2], names)
        parent = option.rpartition(".")[0]
        full = f"{parent}.{guess}" if parent else guess
        fix = f"did you mean {full}?" if guess else f"options are: {', '.join(names)}"
        return ConfigError(option, "...", "there is no such option", fix)
    return ConfigError(option, "...", message, f"see the option's description in {cls.__module__}")
