"""Damaged datasets are named with the fix before any rank starts."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from reading import as_somebody_else

from hp_muon_plugin.errors import DataError
from hp_muon_plugin.train.index_file import MAGIC, check_index, write_dataset

LENGTHS = np.array([5, 3], dtype="<i4")
HEADER_BYTES = 34


def write(folder: Path, *, code: int = 8, tokens: int = 8) -> str:
    prefix = folder / "text"
    np.arange(tokens, dtype="<u2").tofile(f"{prefix}.bin")
    header = struct.pack("<9sQBQQ", MAGIC, 1, code, len(LENGTHS), len(LENGTHS) + 1)
    pointers = np.array([0, 10], dtype="<i8")
    documents = np.array([0, 1, 2], dtype="<i8")
    Path(f"{prefix}.idx").write_bytes(header + LENGTHS.tobytes() + pointers.tobytes() + documents.tobytes())
    return str(prefix)


def change(prefix: str, offset: int, value: bytes) -> None:
    index = Path(f"{prefix}.idx")
    content = bytearray(index.read_bytes())
    content[offset : offset + len(value)] = value
    index.write_bytes(bytes(content))


def test_a_whole_index_gives_its_tokens(tmp_path: Path) -> None:
    file = check_index(write(tmp_path))
    assert file.num_tokens == 8
    assert file.first_tokens(5).tolist() == [0, 1, 2, 3, 4]
    assert len(file.first_tokens(100)) == 8


@pytest.mark.parametrize("kept", [0, 10, 33, 34, 40, 60, 70])
def test_a_truncated_index_is_named(tmp_path: Path, kept: int) -> None:
    prefix = write(tmp_path)
    index = Path(f"{prefix}.idx")
    index.write_bytes(index.read_bytes()[:kept])
    with pytest.raises(DataError, match=r"text\.idx is damaged: it has \d+ bytes") as caught:
        check_index(prefix)
    assert "\n  fix: write the dataset again" in str(caught.value)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"X", "does not begin with MMIDIDX"),
        (9, b"\x02", "version 2"),
        (17, b"\x63", "token type 99 is not known"),
        (HEADER_BYTES, b"\xff\xff\xff\xff", "sequence 0 has a negative length"),
        (HEADER_BYTES, struct.pack("<i", 12), "sequence 1 is said to begin at byte 10, and .* end at byte 24"),
        (HEADER_BYTES + 8, struct.pack("<qq", 1, 11), "sequence 0 is said to begin at byte 1, and .* end at byte 0"),
        (HEADER_BYTES + 16, struct.pack("<q", 9), "sequence 1 is said to begin at byte 9, and .* end at byte 10"),
        (HEADER_BYTES + 24, struct.pack("<qqq", 2, 1, 0), "document indices go from 2 to 0"),
        (HEADER_BYTES + 24, struct.pack("<qqq", 0, 3, 2), "document indices go from 0 to 2, and they must rise"),
        (HEADER_BYTES + 40, struct.pack("<q", 10**9), "document indices go from 0 to 1000000000"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, offset: int, value: bytes, message: str) -> None:
    """Reversed documents were an empty AssertionError of every rank, overlapping sequences trained."""
    prefix = write(tmp_path)
    change(prefix, offset, value)
    with pytest.raises(DataError, match=message):
        check_index(prefix)


@pytest.mark.parametrize("tokens", [6, 9])
def test_a_data_file_of_another_size_than_its_index_says_is_named(tmp_path: Path, tokens: int) -> None:
    prefix = write(tmp_path, tokens=tokens)
    with pytest.raises(
        DataError, match=rf"text\.bin is damaged: it has {2 * tokens} bytes, and its index describes 16"
    ):
        check_index(prefix)


@pytest.mark.parametrize("ending", [".bin", ".idx"])
@pytest.mark.parametrize("spoil", [lambda path: path.chmod(0), lambda path: path.unlink()], ids=["unreadable", "gone"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, ending: str, spoil: Callable[[Path], None]) -> None:
    prefix = write(tmp_path)
    spoil(Path(prefix + ending))
    with as_somebody_else(tmp_path), pytest.raises(DataError, match=rf"text\{ending} cannot be read: .*\n  fix: let"):
        check_index(prefix)


def test_sequences_are_checked_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hp_muon_plugin.train.index_file._CHUNK", 3)
    prefix = str(tmp_path / "text")
    write_dataset(prefix, [np.arange(i, dtype=np.uint16) for i in range(1, 9)])
    assert check_index(prefix).num_tokens == 36
    change(prefix, HEADER_BYTES + 8 * 4 + 8 * 7, struct.pack("<q", 1))
    with pytest.raises(DataError, match="sequence 7 is said to begin at byte 1, and the ones before it end at byte 56"):
        check_index(prefix)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    prefix = str(tmp_path / "text")
    write_dataset(prefix, [np.array([3, 1], dtype=np.uint16), np.array([4], dtype=np.uint16)])
    file = check_index(prefix)
    assert file.lengths.tolist() == [2, 1]
    assert file.first_tokens(3).tolist() == [3, 1, 4]
    assert sorted(os.listdir(tmp_path)) == ["text.bin", "text.idx"]
