"""Comparing checkpoints tensor by tensor, whatever their formats, and a checkpoint with itself."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from hp_muon_plugin.checkpoint.canonical import Info, Key, Kind, Source
from hp_muon_plugin.checkpoint.hashing import PIECE_BYTES, HashingSource, pieces

Count = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two checkpoints differ.

    Attributes:
        key: Which tensor.
        what: In words; names the first element.
    """

    key: Key
    what: str

    def __str__(self) -> str:
        return f"{self.key}: {self.what}"


def masters(source: Source, piece: int = PIECE_BYTES) -> Iterator[Difference]:
    """Parameters whose float32 master does not round to the stored weight.

    Args:
        source: The checkpoint; all masters and their weights are read.
        piece: Bytes to read at a time.
    """
    infos = source.tensors()
    yield from filter(None, (master_difference(source, key.name, piece) for key in infos if key.kind == Kind.main))
    copies = getattr(source, "copies", None)
    for name in copies() if copies else ():
        key = Key(name, Kind.weight)
        for start, stop in pieces(infos[key], piece):
            stored = source.read(key, start, stop)
            found = first_difference(source.read_copy(name, start, stop), stored, start)  # type: ignore[attr-defined]
            if found:
                yield Difference(Key(name, Kind.main), f"the optimizer's copy is not the weight: {found}")
                break


def master_difference(source: Source, name: str, piece: int = PIECE_BYTES) -> Difference | None:
    """Where the float32 master of one parameter does not round to the stored weight; None if it does, or is not there.

    Args:
        source: The checkpoint.
        name: Of the parameter.
        piece: Bytes to read at a time.
    """
    infos, key, weight = source.tensors(), Key(name, Kind.main), Key(name, Kind.weight)
    if key not in infos or weight not in infos:
        return None
    for start, stop in pieces(infos[key], piece):
        main, stored = source.read(key, start, stop), source.read(weight, start, stop)
        found = first_difference(main.to(stored.dtype), stored, start)
        if found:
            return Difference(key, f"rounded, it is not the stored weight: {found}")
    return None


def read_again(output: HashingSource, wanted: Mapping[Key, Info], jobs: int, count: Count) -> list[Difference]:
    """Read what was written, hash it, and compare all its masters with its weights.

    Args:
        output: The new checkpoint; afterwards its digests are known.
        wanted: Tensors of the source. Those of the output that have another shape or type are not hashed.
        jobs: Threads that read; each holds pieces of its own.
        count: Called with the bytes of each parameter that was read.

    Returns:
        Masters that do not belong to their weights.
    """
    infos, keys = output.tensors(), dict[str, list[Key]]()
    for key in infos:
        keys.setdefault(key.name, []).append(key)

    def read(name: str) -> Difference | None:
        found = master_difference(output, name, output.piece_bytes)
        for key in keys[name]:
            if wanted.get(key) == infos[key]:
                output.digest(key)
        return found

    found = []
    with ThreadPoolExecutor(max(1, jobs), "verify") as pool:
        for name, difference in zip(keys, pool.map(read, keys), strict=True):
            found += [difference] if difference else []
            count(sum(infos[key].nbytes for key in keys[name]))
    return found


def sampled_masters(source: Source) -> Iterator[Difference]:
    """As :func:`masters`, of the first rows of every parameter: cheap, and enough for shifted tensors.

    Args:
        source: The checkpoint.
    """
    infos = source.tensors()
    for key, info in infos.items():
        weight = Key(key.name, Kind.weight)
        if key.kind == Kind.main and weight in infos and info.nbytes:
            stop = pieces(info, 2**14)[0][1]
            main, stored = source.read(key, 0, stop), source.read(weight, 0, stop)
            found = first_difference(main.to(stored.dtype), stored, 0)
            if found:
                yield Difference(key, f"rounded, it is not the stored weight: {found}")


def compared(a: Source, b: Source, *, rtol: float | None, atol: float | None, count: Count) -> Iterator[Difference]:
    """Compare two checkpoints.

    Args:
        a: One.
        b: The other, of any format.
        rtol: Relative tolerance; None with ``atol`` None compares bits.
        atol: Absolute tolerance.
        count: Called with the bytes read of both.
    """
    left, right = a.tensors(), b.tensors()
    for key, info in left.items():
        if key not in right:
            yield Difference(key, f"only in {a.path}")
            continue
        other = right[key]
        if info.shape != other.shape or (info.dtype != other.dtype and rtol is None and atol is None):
            yield Difference(key, f"{_text(info)} in {a.path}, {_text(other)} in {b.path}")
            continue
        for start, stop in pieces(info):
            x, y = a.read(key, start, stop), b.read(key, start, stop)
            count(x.nbytes + y.nbytes)
            found = first_difference(x, y, start, rtol=rtol, atol=atol)
            if found:
                yield Difference(key, found)
                break
    for key in right:
        if key not in left:
            yield Difference(key, f"only in {b.path}")


def first_difference(
    x: torch.Tensor, y: torch.Tensor, start: int, *, rtol: float | None = None, atol: float | None = None
) -> str | None:
    """The first element in which two pieces differ, in words; None if they are equal.

    Args:
        x: A piece.
        y: The other one, of the same shape.
        start: Its first row.
        rtol: Relative tolerance; None with ``atol`` None compares bits.
        atol: Absolute tolerance.
    """
    if rtol is None and atol is None:
        if torch.equal(_bits(x), _bits(y)):
            return None
        differs = _bits(x) != _bits(y)
    else:
        a, b = x.to(torch.float64), y.to(torch.float64)
        differs = ~torch.isclose(a, b, rtol=rtol or 0.0, atol=atol or 0.0, equal_nan=True).reshape(-1)
        if not bool(differs.any()):
            return None
    flat = int(differs.nonzero()[0])
    index = []
    rest = flat
    for length in reversed(x.shape):
        index.append(rest % length)
        rest //= length
    place = list(reversed(index))
    if place:
        place[0] += start
    values = f"{x.reshape(-1)[flat].item()!r} and {y.reshape(-1)[flat].item()!r}"
    return f"first at {place}: {values}"


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """One integer per element, so that NaN equals itself and -0 is not 0."""
    return tensor.contiguous().view(-1).view(_WORDS[tensor.dtype.itemsize])


def _text(info: Info) -> str:
    return f"{str(info.dtype).removeprefix('torch.')} {list(info.shape)}"
