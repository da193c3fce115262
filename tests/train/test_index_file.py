"""Damaged datasets are named with the fix before any rank starts."""

import struct
from pathlib import Path

import numpy as np
import pytest

from hp_muon_plugin.errors import ConfigError, DataError
from hp_muon_plugin.train.index_file import MAGIC, check_index, check_parts, check_vocabulary

LENGTHS = np.array([5, 3], dtype="<i4")


def write(folder: Path, *, code: int = 8, tokens: int = 8) -> str:
    prefix = folder / "text"
    np.arange(tokens, dtype="<u2").tofile(f"{prefix}.bin")
    header = struct.pack("<9sQBQQ", MAGIC, 1, code, len(LENGTHS), len(LENGTHS) + 1)
    pointers = np.array([0, 10], dtype="<i8")
    documents = np.array([0, 1, 2], dtype="<i8")
    Path(f"{prefix}.idx").write_bytes(header + LENGTHS.tobytes() + pointers.tobytes() + documents.tobytes())
    return str(prefix)


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
        (34, b"\xff\xff\xff\xff", "negative lengths"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, offset: int, value: bytes, message: str) -> None:
    prefix = write(tmp_path)
    index = Path(f"{prefix}.idx")
    content = bytearray(index.read_bytes())
    content[offset : offset + len(value)] = value
    index.write_bytes(bytes(content))
    with pytest.raises(DataError, match=message):
        check_index(prefix)


def test_a_data_file_shorter_than_its_index_is_named(tmp_path: Path) -> None:
    prefix = write(tmp_path, tokens=6)
    with pytest.raises(DataError, match=r"text\.bin is damaged: it has 12 bytes, and its index points up to byte 16"):
        check_index(prefix)


def test_a_part_too_small_for_one_sample_is_named(tmp_path: Path) -> None:
    """megatron-core itself would look for samples without end."""
    file = check_index(write(tmp_path))
    check_parts(file, "50,50,0", seq_length=2)
    with pytest.raises(ConfigError, match=r"the held-out part has 1 of 2 sequences with 3 tokens"):
        check_parts(file, "50,50,0", seq_length=3)
    with pytest.raises(ConfigError, match=r"the held-out part has 0 of 2 sequences with 0 tokens"):
        check_parts(file, "99,1,0", seq_length=1)


def test_a_vocabulary_smaller_than_the_ids_is_named(tmp_path: Path) -> None:
    file = check_index(write(tmp_path))
    check_vocabulary(file, 8, first=100)
    with pytest.raises(ConfigError, match=r"data\.vocab_size=7: .*holds token id 7"):
        check_vocabulary(file, 7, first=100)
