"""Plain values as JSON, exactly: tuples, NaN, bytes and keys that are no strings come back as they were.

A tensor cannot stand in JSON. It is taken out first, under a name that tells its place, and put back after.
"""

import base64
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hp_muon_plugin.errors import CheckpointError, DamageError

_TAG = "$"
_TUPLE, _ITEMS, _FLOAT, _BYTES, _TENSOR = "$tuple", "$items", "$float", "$bytes", "$tensor"


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands for a tensor that is stored apart.

    Attributes:
        name: Under which it is stored, as ``random/rank0/torch``.
    """

    name: str


def take_tensors(value: Any, name: str, into: dict[str, torch.Tensor]) -> Any:
    """A copy of a value with every tensor replaced by a :class:`TensorRef`.

    Args:
        value: Dicts, lists, tuples, plain values, tensors.
        name: Of the value; names of tensors begin with it.
        into: Receives the tensors by name.

    Returns:
        The copy.
    """
    if isinstance(value, torch.Tensor):
        into[name] = value.detach()
        return TensorRef(name)
    if isinstance(value, dict):
        return {key: take_tensors(item, f"{name}/{key}", into) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([take_tensors(item, f"{name}/{index}", into) for index, item in enumerate(value)])
    return value


def put_tensors(value: Any, read: Callable[[str], torch.Tensor]) -> Any:
    """The inverse of :func:`take_tensors`.

    Args:
        value: What it returned.
        read: Gives the tensor of a name.

    Returns:
        A copy with tensors.
    """
    if isinstance(value, TensorRef):
        return read(value.name)
    if isinstance(value, dict):
        return {key: put_tensors(item, read) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([put_tensors(item, read) for item in value])
    return value


def encode(value: Any, where: str) -> Any:
    """A value in what JSON has.

    Args:
        value: None, bool, int, float, str, bytes, :class:`TensorRef`, and lists, tuples and dicts of these.
        where: What it is, for the message.

    Returns:
        What ``json.dumps(..., allow_nan=False)`` takes.

    Raises:
        CheckpointError: If something is none of these.
    """
    if isinstance(value, float) and type(value) is float:
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, TensorRef):
        return {_TENSOR: value.name}
    if type(value) is bytes:
        return {_BYTES: base64.b64encode(value).decode("ascii")}
    if type(value) is list:
        return [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if type(value) is tuple:
        return {_TUPLE: [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]}
    if isinstance(value, Mapping):
        if all(type(key) is str and not key.startswith(_TAG) for key in value):
            return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
        return {_ITEMS: [[encode(key, where), encode(item, f"{where}.{key}")] for key, item in value.items()]}
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold\n"
        "  fix: leave it out, or put plain values or tensors there"
    )


def decode(value: Any, where: str) -> Any:
    """The inverse of :func:`encode`.

    Args:
        value: What JSON gave.
        where: What it is, for the message.

    Returns:
        The value.

    Raises:
        CheckpointError: If it was not made by :func:`encode`.
    """
    if isinstance(value, list):
        return [decode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith(_TAG) for key in value):
        return {key: decode(item, f"{where}.{key}") for key, item in value.items()}
    try:
        ((tag, held),) = value.items()
        return _DECODERS[tag](held, where)
    except (KeyError, ValueError, TypeError) as error:
        raise DamageError(f"{where} is damaged: {value!r:.200} is no value ({error})") from error


def _items(held: Any, where: str) -> dict[Any, Any]:
    return {decode(key, where): decode(item, f"{where}.{key}") for key, item in held}


def _float(held: Any, where: str) -> float:
    if held not in ("nan", "inf", "-inf"):
        raise ValueError(held)
    return float(held)


def _tensor(held: Any, where: str) -> TensorRef:
    if not isinstance(held, str):
        raise TypeError(held)
    return TensorRef(held)


_DECODERS: dict[str, Callable[[Any, str], Any]] = {
    _TUPLE: lambda held, where: tuple(decode(list(held), where)),
    _ITEMS: _items,
    _FLOAT: _float,
    _BYTES: lambda held, where: base64.b64decode(held, validate=True),
    _TENSOR: _tensor,
}
