"""Directories of archives: what zipfile says of them, or nothing."""

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hp_muon_plugin.checkpoint.files import Files
from hp_muon_plugin.checkpoint.torch_archive import Archive, raw_bytes
from hp_muon_plugin.checkpoint.torch_archive_write import TensorArchive
from hp_muon_plugin.checkpoint.zip_directory import content, entries
from hp_muon_plugin.errors import CheckpointError

TENSOR = torch.arange(12.0).view(3, 4)


def _torchs() -> bytes:
    buffer = io.BytesIO()
    torch.save({"x": TENSOR, "y": torch.ones(5, dtype=torch.bfloat16)}, buffer)
    return buffer.getvalue()


def _ours() -> bytes:
    parts = TensorArchive(TENSOR.dtype, TENSOR.shape).parts([raw_bytes(TENSOR)])
    return b"".join(bytes(part) for part in parts)


def _zipfiles(*, method: int = zipfile.ZIP_STORED, comment: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive, zipfile.ZipFile(io.BytesIO(_torchs())) as source:
        for info in source.infolist():
            with archive.open(zipfile.ZipInfo(info.filename), "w", force_zip64=True) as entry:
                entry.write(source.read(info))
        archive.comment = comment
    return buffer.getvalue()


def _at(raw: bytes) -> Callable[[int, int], bytes]:
    return lambda first, count: raw[first : first + count]


@pytest.mark.parametrize("raw", [_torchs(), _ours(), _zipfiles()], ids=["torch", "ours", "zipfile"])
def test_entries_and_contents_are_zipfiles(raw: bytes) -> None:
    found = entries(_at(raw), len(raw))
    assert found is not None
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        for info, entry in zip(archive.infolist(), found.values(), strict=True):
            names = ("filename", "compress_type", "CRC", "file_size", "header_offset")
            assert tuple(entry) == tuple(getattr(info, name) for name in names)
            assert content(_at(raw), entry) == archive.read(info)


def test_what_is_unusual_is_left_to_zipfile(tmp_path: Path) -> None:
    for raw in (_zipfiles(comment=b"x"), _torchs() + b"\0", b"", _torchs()[:-1]):
        assert entries(_at(raw), len(raw)) is None
    squeezed = _zipfiles(method=zipfile.ZIP_DEFLATED)
    found = entries(_at(squeezed), len(squeezed))
    assert found is not None
    assert content(_at(squeezed), found["archive/data.pkl"]) is None or not found["archive/data.pkl"].compress_type
    (tmp_path / "x.pt").write_bytes(_zipfiles(comment=b"x"))
    assert set(Archive(Files(tmp_path), "x.pt").value) == {"x", "y"}


def _places(path: Path) -> list[object]:
    """What an archive says, and where each of its tensors lies."""
    archive = Archive(Files(path.parent), path.name)
    tensors = archive.value.values() if isinstance(archive.value, dict) else [archive.value]
    return [archive.value, *(archive.located(tensor) for tensor in tensors)]


@pytest.mark.parametrize("raw", [_torchs(), _ours()], ids=["torch", "ours"])
def test_damage_is_told_or_does_not_matter(raw: bytes, tmp_path: Path) -> None:
    """Each byte of the directory and of the description, one after the other."""
    path = tmp_path / "x.pt"
    path.write_bytes(raw)
    intact = _places(path)
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        described = next(info for info in archive.infolist() if info.filename.endswith("data.pkl"))
        places = [*range(described.header_offset, described.header_offset + 200), *range(archive.start_dir, len(raw))]
    told = 0
    for place in places:
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 0xFF]) + raw[place + 1 :])
        try:
            assert _places(path) == intact, place
        except CheckpointError:
            told += 1
    assert 100 < told < len(places)  # dates and versions do not matter
