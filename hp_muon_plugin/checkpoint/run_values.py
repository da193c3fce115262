"""Arguments and random states of a Megatron run as plain values, and back to what its loader expects."""

import argparse
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hp_muon_plugin.checkpoint.safe_pickle import StandIn

_ARRAY = "numpy"


def plain(value: Any) -> Any:
    """A value of a checkpoint in plain types; tensors stay.

    Dtypes become ``"torch.bfloat16"``, enums their value, namespaces dicts, arrays ``("numpy", dtype, list)``.

    Args:
        value: As the safe loaders give it.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes | torch.Tensor):
        return value
    if isinstance(value, argparse.Namespace):
        return {str(key): plain(item) for key, item in vars(value).items()}
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, StandIn):
        return plain(value.given[0]) if value.given else value.class_name
    if isinstance(value, np.ndarray):
        return (_ARRAY, str(value.dtype), value.tolist())
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, torch.Size):
        return tuple(value)
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    return str(value)


def number(value: Any) -> float:
    """A step count, which may be a tensor of one element."""
    return float(value.item() if isinstance(value, torch.Tensor) else value)


def namespace(args: Mapping[str, Any]) -> argparse.Namespace:
    """Arguments as Megatron's loader reads them.

    Args:
        args: From :func:`plain`.
    """
    return argparse.Namespace(**{key: _dtype(value) for key, value in args.items()})


def random_state(value: Any) -> Any:
    """A random state as Megatron's loader reads it: arrays are arrays again.

    Args:
        value: From :func:`plain`.
    """
    if isinstance(value, tuple) and len(value) == 3 and value[0] == _ARRAY:
        return np.array(value[2], dtype=value[1])
    if isinstance(value, Mapping):
        return {key: random_state(item) for key, item in value.items()}
    if isinstance(value, list):
        return [random_state(item) for item in value]
    if isinstance(value, tuple):
        return tuple(random_state(item) for item in value)
    return value


def _dtype(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("torch."):
        found = getattr(torch, value.removeprefix("torch."), None)
        return found if isinstance(found, torch.dtype) else value
    return value
