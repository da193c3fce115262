"""Megatron's ``.bin``/``.idx`` pairs: checking one before training starts, and writing one.

megatron-core reads the index with memory maps and few checks: a truncated file is a crash in the
middle of a run, or silent garbage. The format: 9 bytes magic, 8 bytes version (1), 1 byte type
code, 8 bytes number of sequences, 8 bytes number of document indices, then int32 lengths, int64
pointers (bytes) and int64 document indices (sequences, from 0 to their number), all little endian.
Whoever writes one puts the sequences one after the other, so the pointers follow from the lengths.
"""

import os
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hp_muon_plugin.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TOKEN_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # megatron-core's integer type codes
_UINT16 = 8
_REWRITE = "write the dataset again with Megatron's tools/preprocess_data.py"
_CHUNK = 1 << 20  # sequences looked at together: an index of 100 million takes 8 MiB at a time


@dataclass(frozen=True, slots=True)
class TokenFile:
    """A checked dataset.

    Attributes:
        path: The ``.bin`` file.
        lengths: ``(sequences,)`` int32, tokens of each sequence, memory-mapped.
        dtype: Type of the tokens, as numpy writes it.
    """

    path: Path
    lengths: np.ndarray
    dtype: str

    @property
    def num_tokens(self) -> int:
        """Tokens in the file."""
        return int(self.lengths.sum(dtype=np.int64))

    def first_tokens(self, count: int) -> np.ndarray:
        """Read the first tokens.

        Args:
            count: At most this many.

        Returns:
            ``(min(count, num_tokens),)`` token ids.
        """
        return np.fromfile(self.path, dtype=self.dtype, count=min(count, self.num_tokens))


def check_index(prefix: str) -> TokenFile:
    """Check that an index is whole, agrees with itself and fits its data file.

    Args:
        prefix: Path without ``.bin`` and ``.idx``.

    Returns:
        What the index says.

    Raises:
        DataError: Naming the file, what is wrong with it, and the fix.
    """
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    size, data_size = _readable_size(index), _readable_size(data)
    if size < _HEADER.size:
        raise _damaged(index, f"it has {size} bytes, and the header alone has {_HEADER.size}")
    with index.open("rb") as stream:
        magic, version, code, sequences, documents = _HEADER.unpack(stream.read(_HEADER.size))
    if magic != MAGIC:
        raise _damaged(index, "it does not begin with MMIDIDX, so it is no Megatron index")
    if version != 1 or code not in _TOKEN_TYPES:
        raise _damaged(index, f"version {version} or token type {code} is not known")
    wanted = _HEADER.size + sequences * (4 + 8) + documents * 8
    if size < wanted:
        raise _damaged(index, f"it has {size} bytes, and {sequences} sequences in {documents} documents need {wanted}")
    if sequences == 0 or documents < 2:
        raise _damaged(index, "it holds no document")
    lengths = np.memmap(index, "<i4", "r", _HEADER.size, (sequences,))
    pointers = np.memmap(index, "<i8", "r", _HEADER.size + 4 * sequences, (sequences,))
    starts = np.memmap(index, "<i8", "r", _HEADER.size + 12 * sequences, (documents,))
    end = _check_pointers(index, lengths, pointers, np.dtype(_TOKEN_TYPES[code]).itemsize)
    _check_documents(index, starts, sequences)
    if end != data_size:
        raise _damaged(data, f"it has {data_size} bytes, and its index describes {end}")
    return TokenFile(data, lengths, _TOKEN_TYPES[code])


def _check_pointers(index: Path, lengths: np.ndarray, pointers: np.ndarray, token_bytes: int) -> int:
    """Every sequence begins where the one before it ends; returns where the last one ends."""
    end = 0
    for first in range(0, len(lengths), _CHUNK):
        sizes = lengths[first : first + _CHUNK].astype(np.int64) * token_bytes
        if int(sizes.min()) < 0:
            raise _damaged(index, f"sequence {first + int(sizes.argmin())} has a negative length")
        begins = end + np.cumsum(sizes) - sizes
        wrong = np.flatnonzero(pointers[first : first + _CHUNK] != begins)
        if wrong.size:
            place = int(wrong[0])
            raise _damaged(
                index,
                f"sequence {first + place} is said to begin at byte {int(pointers[first + place])}, and the ones "
                f"before it end at byte {int(begins[place])}",
            )
        end = int(begins[-1] + sizes[-1])
    return end


def _check_documents(index: Path, starts: np.ndarray, sequences: int) -> None:
    if int(starts[0]) != 0 or int(starts[-1]) != sequences or bool((np.diff(starts) < 0).any()):
        raise _damaged(
            index,
            f"its document indices go from {int(starts[0])} to {int(starts[-1])}, and they must rise "
            f"from 0 to the number of sequences, {sequences}",
        )


def write_dataset(prefix: str, documents: Sequence[np.ndarray]) -> None:
    """Write a dataset with one sequence per document, byte for byte as megatron-core would.

    Both files are written beside their final names and renamed when whole.

    Args:
        prefix: Path without ``.bin`` and ``.idx``.
        documents: uint16 tokens of each document.
    """
    for ending, content in dataset_bytes(documents).items():
        part = Path(f"{prefix}.{secrets.token_hex(4)}.partial")  # ranks of several machines may be here at once
        part.write_bytes(content)
        os.replace(part, prefix + ending)


def dataset_bytes(documents: Sequence[np.ndarray]) -> dict[str, bytes]:
    """Content of the two files of a dataset with one sequence per document.

    Args:
        documents: uint16 tokens of each document.

    Returns:
        Content by ending, ``.bin`` and ``.idx``.
    """
    lengths = np.array([len(document) for document in documents], dtype="<i4")
    sizes = lengths.astype("<i8") * np.dtype(_TOKEN_TYPES[_UINT16]).itemsize
    pointers = np.cumsum(sizes) - sizes
    starts = np.arange(len(documents) + 1, dtype="<i8")
    header = _HEADER.pack(MAGIC, 1, _UINT16, len(documents), len(documents) + 1)
    tokens = np.concatenate(documents).astype(_TOKEN_TYPES[_UINT16])
    index = header + lengths.tobytes() + pointers.astype("<i8").tobytes() + starts.tobytes()
    return {".bin": tokens.tobytes(), ".idx": index}


def _readable_size(path: Path) -> int:
    try:
        with path.open("rb") as stream:
            return os.fstat(stream.fileno()).st_size
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}\n  fix: let this user read it, or give another data.path"
        ) from None


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"{path} is damaged: {why}\n  fix: {_REWRITE}")
