"""Archives of torch.save: where each tensor's bytes lie in the file, and the reverse, without torch.load.

An archive is a zip file without compression: ``data.pkl`` describes, ``data/<n>`` are the storages. It may lie
anywhere inside a larger file, as in the ``.distcp`` files of torch.distributed.checkpoint.
"""

import argparse
import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch

from hp_muon_plugin.checkpoint.checksums import Checksum
from hp_muon_plugin.checkpoint.files import Files
from hp_muon_plugin.checkpoint.safe_pickle import Stored, load_values
from hp_muon_plugin.checkpoint.zip_directory import MAX_BYTES, Entry, content, content_start, entries
from hp_muon_plugin.errors import DamageError

_EDGE = 4096  # bytes of either end of an archive: there an archive of one tensor has all but the tensor


@dataclass(frozen=True, slots=True)
class Located:
    """A stored tensor and the place of its bytes.

    Attributes:
        file: Name in the checkpoint folder.
        start: First byte of its storage.
        stored: What it is.
        check: Follows what is read of the storage.
    """

    file: str
    start: int
    stored: Stored
    check: Checksum = field(compare=False)


class _Window(io.RawIOBase):
    """A part of a file as a file. Its ends are read once: they are asked for in a dozen small pieces."""

    def __init__(self, files: Files, file: str, start: int, length: int, what: str) -> None:
        self._files, self._file, self._start, self._length, self._what = files, file, start, length, what
        self._at = 0
        self._ends: dict[int, bytes] = {}  # by first byte

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        count = left if size < 0 else min(size, left)
        if count > MAX_BYTES:
            raise zipfile.BadZipFile("a description of more than 256 MiB")
        found = self.bytes_at(self._at, count)
        self._at += count
        return found

    def bytes_at(self, first: int, count: int) -> bytes:
        """Bytes of the window, from what is known of its ends where they lie there."""
        tail = max(0, self._length - _EDGE)
        if first + count <= self._length and (first >= tail or first + count <= _EDGE):
            begin = tail if first >= tail else 0
            if begin not in self._ends:
                length = min(_EDGE, self._length)
                self._ends[begin] = self._files.read(self._file, self._start + begin, length, self._what)
            return self._ends[begin][first - begin : first - begin + count]
        return self._files.read(self._file, self._start + first, count, self._what)


class Archive:
    """An archive inside a file.

    Args:
        files: Files of the checkpoint.
        file: Name in its folder.
        start: First byte of the archive.
        length: Its bytes; None to the end of the file.
        what: What it holds, for messages.

    Attributes:
        value: What was saved; tensors as :class:`Stored`.

    Raises:
        CheckpointError: If it is damaged, or wants a class that is not on the list.
    """

    def __init__(self, files: Files, file: str, start: int = 0, length: int | None = None, what: str = "") -> None:
        self._files, self._file, self._start, self._what = files, file, start, what
        self._checks: dict[str, Checksum] = {}
        length = files.size(file, what) - start if length is None else length
        self._window = _Window(files, file, start, length, what)
        try:
            raw = self._opened(length)
        except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, EOFError) as error:
            raise DamageError(
                f"{self._where} is damaged or no torch.save archive: {error}\n"
                "  fix: copy the file again from where it was saved"
            ) from error
        self.value: Any = load_values(raw, self._where)

    @property
    def _where(self) -> str:
        return f"{self._files.folder / self._file}" + (f" ({self._what})" if self._what else "")

    def _opened(self, length: int) -> bytes:
        """Read the directory; returns ``data.pkl``."""
        at = self._window.bytes_at
        found = entries(at, length)
        if found is not None:
            self._entries = found
            small = {name: content(at, found[name]) for name in self._described_by()}
            if None not in small.values():
                return self._checked(small)
        with zipfile.ZipFile(self._window) as archive:
            infos = archive.infolist()
            self._entries = {
                info.filename: Entry(info.filename, info.compress_type, info.CRC, info.file_size, info.header_offset)
                for info in infos
            }
            return self._checked({name: archive.read(name) for name in self._described_by()})

    def _described_by(self) -> list[str]:
        """Names of ``data.pkl`` and, if it is there, of the byte order."""
        pickles = [name for name in self._entries if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise zipfile.BadZipFile("no data.pkl")
        self._prefix = pickles[0].removesuffix("data.pkl")
        order = f"{self._prefix}byteorder"
        return [pickles[0], order] if order in self._entries else pickles

    def _checked(self, small: Mapping[str, bytes | None]) -> bytes:
        raw = small[f"{self._prefix}data.pkl"]
        assert raw is not None
        if small.get(f"{self._prefix}byteorder", b"little") != b"little":
            raise zipfile.BadZipFile("written on a big-endian machine")
        return raw

    def located(self, stored: Stored) -> Located:
        """Where the bytes of one of its tensors lie.

        Args:
            stored: A tensor of :attr:`value`.

        Raises:
            CheckpointError: If its storage is missing or of another size.
        """
        entry = self._entries.get(f"{self._prefix}data/{stored.key}")
        needed = stored.numel * stored.dtype.itemsize
        if entry is None or entry.compress_type != zipfile.ZIP_STORED or entry.file_size < needed:
            raise DamageError(f"{self._where} is damaged: storage {stored.key} is missing, short or compressed")
        first = content_start(self._window.bytes_at, entry)
        if first is None:
            raise DamageError(f"{self._where} is damaged: no header where storage {stored.key} begins")
        check = self._checks.get(stored.key)
        if check is None:
            begin = self._start + first
            check = Checksum(
                entry.CRC, entry.file_size, self._where, partial(_bytes_of, self._files, self._file, begin, self._what)
            )
            self._checks[stored.key] = check
            self._files.follow(check)
        return Located(self._file, self._start + first, stored, check)


def _bytes_of(files: Files, file: str, begin: int, what: str, at: int, count: int) -> bytes:
    """Bytes of a storage. A checkpoint has a storage in each of many archives, of which nothing else is kept."""
    return files.read(file, begin + at, count, what)


def read_whole(files: Files, located: Located, what: str = "") -> torch.Tensor:
    """A whole tensor, as it was saved.

    Args:
        files: Files of the checkpoint.
        located: Which.
        what: Its name, for messages.
    """
    stored = located.stored
    if 0 in stored.shape:
        return torch.empty(stored.shape, dtype=stored.dtype)
    span = 1 + sum((length - 1) * step for length, step in zip(stored.shape, stored.stride, strict=True))
    flat = torch.empty(span, dtype=stored.dtype)
    fill(files, located, stored.offset, flat, what)
    return flat.as_strided(stored.shape, stored.stride).contiguous()


def fill(files: Files, located: Located, first: int, flat: torch.Tensor, what: str = "") -> None:
    """Read consecutive elements of a storage.

    Args:
        files: Files of the checkpoint.
        located: The tensor.
        first: First element, counted in its storage.
        flat: (n,) contiguous; filled.
        what: Its name, for messages.

    Raises:
        CheckpointError: If the file is too short, or with the last bytes of a storage if they are not what was written.
    """
    begin = first * flat.dtype.itemsize
    if not flat.numel():
        return
    found = raw_bytes(flat)
    files.read_into(located.file, located.start + begin, found, what)
    located.check.note(begin, found)


def raw_bytes(flat: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as bytes; no copy."""
    return memoryview(cast(Any, flat.reshape(-1).view(torch.uint8).numpy()))


def load(files: Files, file: str, start: int = 0, length: int | None = None, what: str = "") -> Any:
    """Value of a small archive with its tensors read into memory. For run state, not for weights.

    Args:
        files: Files of the checkpoint.
        file: Name in its folder.
        start: First byte of the archive.
        length: Its bytes; None to the end of the file.
        what: What it holds, for messages.

    Raises:
        CheckpointError: If it is damaged, or wants a class that is not on the list.
    """
    archive = Archive(files, file, start, length, what)
    return filled(archive.value, files, archive, what)


def filled(value: Any, files: Files, archive: Archive, what: str) -> Any:
    """A value of an archive with its tensors read into memory, as :func:`load`."""
    if isinstance(value, Stored):
        return read_whole(files, archive.located(value), what)
    if isinstance(value, dict):
        return {key: filled(item, files, archive, what) for key, item in value.items()}
    if isinstance(value, argparse.Namespace):
        return argparse.Namespace(**filled(vars(value), files, archive, what))
    if type(value) in (list, tuple):
        return type(value)(filled(item, files, archive, what) for item in value)
    return value
