"""Archives that ours writes are what zipfile and torch.load read, of any size, on either side of every limit."""

import io
import os
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from isal.isal_zlib import crc32

from hp_muon_plugin.checkpoint import torch_archive
from hp_muon_plugin.checkpoint.files import Files
from hp_muon_plugin.checkpoint.lazy import Lazy
from hp_muon_plugin.checkpoint.torch_archive_stream import write_archive
from hp_muon_plugin.checkpoint.zip_records import Record, directory

JOBS = 2


def _value() -> dict[str, Any]:
    whole = torch.arange(600_000, dtype=torch.float32).view(6000, 100)  # of more than one block
    return {
        "lazy": Lazy((6000, 100), torch.float32, lambda a, b: whole[a:b].clone()),
        "tensor": whole[:3].to(torch.bfloat16),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        "plain": [1, "x", {"y": None}],
    }


def _written(folder: Path) -> tuple[Path, int]:
    counted: list[int] = []
    write_archive(folder / "a.pt", _value(), counted.append, JOBS)
    return folder / "a.pt", sum(counted)


def test_torch_zipfile_and_ours_read_what_was_written(tmp_path: Path) -> None:
    path, counted = _written(tmp_path)
    assert counted == 2_400_000 + 600 + 8
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == [f"archive/{name}" for name in ("data.pkl", "byteorder", *_data(), "version")]
    _assert_equal(torch.load(path))
    _assert_equal(torch_archive.load(Files(tmp_path), "a.pt"))


def test_only_what_does_not_fit_32_bits_has_a_longer_field() -> None:
    full = 2**32 - 1
    for nbytes, at, fields in (
        (full - 1, full - 1, []),
        (full, 0, [full, full]),
        (7, full, [full]),
        (2**40, 2**41, [2**40, 2**40, 2**41]),
    ):
        assert _fields_of(Record("x", nbytes, at).central()) == fields


def _data() -> list[str]:
    return [f"data/{number}" for number in range(4)]


def _fields_of(central: bytes) -> list[int]:
    """The 64-bit fields of an entry of the directory."""
    name, extra = int.from_bytes(central[28:30], "little"), int.from_bytes(central[30:32], "little")
    raw = central[46 + name : 46 + name + extra]
    return [int.from_bytes(raw[at : at + 8], "little") for at in range(4, len(raw), 8)]


def _assert_equal(loaded: dict[str, Any]) -> None:
    value = _value()
    assert torch.equal(loaded["lazy"], value["lazy"].rows())
    for name in ("tensor", "scalar", "empty"):
        assert torch.equal(loaded[name], value[name])
        assert loaded[name].dtype == value[name].dtype
    assert loaded["plain"] == value["plain"]


def test_contents_begin_at_multiples_of_64_and_nothing_overlaps() -> None:
    at, records = 0, []
    for number in range(200):
        records.append(Record(f"archive/data/{number}", number * 7 % 65, at))
        at = records[-1].end
    for record, later in pairwise(records):
        assert record.content_at % 64 == 0
        assert record.end == later.content_at - len(later.local())


def test_an_archive_of_more_than_four_gib_is_read(tmp_path: Path) -> None:
    """Sparse: 5 GiB of zeros that take no room, and small contents before and behind."""
    path, big = tmp_path / "big.zip", 5 * 2**30
    contents = [(b"first", 5), (b"", big), (b"behind", 6)]
    records: list[Record] = []
    with open(path, "wb") as file:
        for number, (content, nbytes) in enumerate(contents):
            records.append(Record(f"archive/{number}", nbytes, records[-1].end if records else 0))
            records[-1].crc = crc32(content)
            os.pwrite(file.fileno(), records[-1].local(), records[-1].content_at - len(records[-1].local()))
            os.pwrite(file.fileno(), content, records[-1].content_at)
        os.pwrite(file.fileno(), directory(records), records[-1].end)
    with zipfile.ZipFile(path) as archive:
        assert [info.file_size for info in archive.infolist()] == [5, big, 6]
        assert archive.infolist()[2].header_offset > big
        assert archive.read("archive/0") == b"first"
        assert archive.read("archive/2") == b"behind"


def test_more_records_than_sixteen_bits_count() -> None:
    file, at, records = io.BytesIO(), 0, []
    for number in range(70_000):
        records.append(Record(str(number), 0, at))
        at = records[-1].end
    for record in records:
        file.seek(record.content_at - len(record.local()))
        file.write(record.local())
    file.seek(records[-1].end)
    file.write(directory(records))
    with zipfile.ZipFile(file) as archive:
        assert len(archive.infolist()) == 70_000
        assert archive.read("69999") == b""
