"""What pickles of checkpoints are built from: stand-ins for classes, tensors that stay in their file, arrays."""

import pickle
import re
import signal
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch

from hp_muon_plugin.errors import DamageError


class StandIn:
    """A value of a class that we do not load: its name, what it was built from, and its attributes.

    Attributes:
        class_name: Module and name of the class.
        given: Arguments of its constructor, as an enum's value.
        state: What its pickle sets that is not a dict of attributes, or None.
    """

    class_name = ""
    given: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *given: Any) -> "StandIn":
        """Keep the arguments; call nothing."""
        made = super().__new__(cls)
        made.given = given
        return made

    def __init__(self, *given: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state

    def __getattr__(self, name: str) -> Any:
        raise DamageError(f"a {self.class_name} of the checkpoint has no {name!r}")

    def __repr__(self) -> str:
        return f"{self.class_name}{self.given!r}"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor whose bytes stay in the file.

    Attributes:
        key: Name of its storage in the archive.
        dtype: Type of an element.
        shape: Shape.
        stride: Strides, in elements.
        offset: First element in the storage.
        numel: Elements of the storage.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage in the archive: name, type of an element, elements."""

    key: str
    dtype: torch.dtype
    numel: int


STORAGES = {
    f"{kind}Storage": dtype
    for kind, dtype in {
        "Float": torch.float32,
        "Double": torch.float64,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Byte": torch.uint8,
        "Char": torch.int8,
        "Short": torch.int16,
        "Int": torch.int32,
        "Long": torch.int64,
        "Bool": torch.bool,
    }.items()
}
DTYPES = {
    name: value
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "bool"),
        *("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    )
    if isinstance(value := getattr(torch, name, None), torch.dtype)
}
_ELEMENT = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248]|\?)\Z")


def tensor(
    storage: Any, offset: int, size: Any, stride: Any, requires_grad: bool = False, hooks: Any = None, extra: Any = None
) -> Stored:
    """A tensor of a storage, checked against its size."""
    if not isinstance(storage, Storage):
        raise pickle.UnpicklingError("a tensor without a storage")
    shape, strides = tuple(size), tuple(stride)
    integers = all(type(value) is int and value >= 0 for value in (*shape, *strides, offset))
    if not integers or len(shape) != len(strides):
        raise pickle.UnpicklingError("a tensor with impossible sizes")
    last = offset + sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
    if 0 not in shape and last >= storage.numel:
        raise pickle.UnpicklingError("a tensor that reaches past its storage")
    return Stored(storage.key, storage.dtype, shape, strides, offset, storage.numel)


def typed_tensor(build: Any, kind: Any, given: Any, state: Any) -> Stored:
    """A tensor of a subclass, as a plain one."""
    if build is not tensor:
        raise pickle.UnpicklingError("a tensor that is not built from a storage")
    return cast(Stored, tensor(*given))


def parameter(data: Any, requires_grad: Any = None, hooks: Any = None, state: Any = None) -> Any:
    """A parameter, as its tensor."""
    return data


def latin(text: str, encoding: str = "") -> bytes:
    """Bytes that protocol 2 writes as text."""
    if encoding != "latin1":
        raise pickle.UnpicklingError("bytes in an unknown encoding")
    return text.encode("latin1")


def signal_number(number: int) -> int:
    """A signal, as its number."""
    return int(signal.Signals(number))


def scalar(dtype: Any, raw: bytes) -> Any:
    """A numpy scalar, as a plain number."""
    return np.frombuffer(raw, element(dtype))[0].item()


class Marker:
    """A name that a pickle passes round without calling it."""

    def __init__(self, *given: Any) -> None:
        raise pickle.UnpicklingError("a class that is not meant to be called")


class Dtype(StandIn):
    """A numpy dtype, not yet checked."""

    class_name = "numpy.dtype"


class Array(StandIn):
    """A numpy array, not yet checked."""

    class_name = "numpy.ndarray"


def element(dtype: Any) -> np.dtype[Any]:
    """The numpy type of a stand-in: numbers only, in either byte order."""
    spec = dtype.given[0] if isinstance(dtype, Dtype) and dtype.given else None
    if not isinstance(spec, str) or not _ELEMENT.match(spec):
        raise pickle.UnpicklingError(f"an array of {spec!r}")
    order = dtype.state[1] if isinstance(dtype.state, tuple) and len(dtype.state) > 1 else "="
    return np.dtype(spec).newbyteorder(cast(Literal["<", ">", "=", "|"], order if order in ("<", ">", "|") else "="))


def array(*given: Any) -> Array:
    """An empty array, filled by its state."""
    return Array()


def settled_array(array: Array) -> np.ndarray[Any, Any]:
    """The array of a stand-in."""
    _, shape, dtype, fortran, raw = array.state
    if not isinstance(raw, bytes):
        raise pickle.UnpicklingError("an array of objects")
    return np.frombuffer(raw, element(dtype)).reshape(shape, order="F" if fortran else "C").copy()
