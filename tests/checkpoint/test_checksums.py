"""A flipped bit of a source is found while it is read, by the checksum that torch wrote with each storage."""

import zipfile
from pathlib import Path

import pytest
import torch
from isal.isal_zlib import crc32

from hp_muon_plugin.bench.made_up import gpt
from hp_muon_plugin.checkpoint import torch_archive
from hp_muon_plugin.checkpoint.canonical import Target
from hp_muon_plugin.checkpoint.check import verified
from hp_muon_plugin.checkpoint.checksums import Checksum
from hp_muon_plugin.checkpoint.convert import convert, plan
from hp_muon_plugin.checkpoint.files import Files
from hp_muon_plugin.checkpoint.formats import open_checkpoint
from hp_muon_plugin.checkpoint.progress import Progress
from hp_muon_plugin.errors import CheckpointError

CONTENT = bytes(range(256)) * 4000


def _convert(path: Path, to: str, out: Path) -> None:
    source = open_checkpoint(path)
    try:
        convert(plan(source, to, Target()), out, drop=True)
    finally:
        source.close()


def _places(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, int]]:
    """A byte in the middle of each part of a file that is read as a tensor."""
    found: list[tuple[Path, int]] = []
    fill = torch_archive.fill

    def told(files: Files, located: torch_archive.Located, first: int, flat: torch.Tensor, what: str = "") -> None:
        fill(files, located, first, flat, what)
        begin = located.start + first * flat.dtype.itemsize
        found.append((files.folder / located.file, begin + flat.nbytes // 2))

    with monkeypatch.context() as patch:
        patch.setattr(torch_archive, "fill", told)
        source = open_checkpoint(path)
        for key in source.tensors():
            source.read(key)
        source.close()
    return found


@pytest.mark.parametrize("name", ["hp", "torch_dist", "torch", "fsdp_dtensor", "fsdp2", "torch_dcp", "hyper_parallel"])
def test_a_flipped_bit_anywhere_is_refused_by_the_name_of_its_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(plan(gpt(1, hidden=16), name, Target()), tmp_path / "ckpt", drop=True)
    places = _places(tmp_path / "ckpt", monkeypatch)
    assert len(places) > 20
    for path, at in places[::7]:
        with open(path, "r+b") as file:
            file.seek(at)
            old = file.read(1)
            file.seek(at)
            file.write(bytes([old[0] ^ 4]))
        with pytest.raises(CheckpointError, match=rf"{path.name}|do not belong|do not round"):
            _convert(tmp_path / "ckpt", "hp" if name != "hp" else "torch_dist", tmp_path / "out")
        assert not any((tmp_path / "out").glob("iter_*"))
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(old)
    source = open_checkpoint(tmp_path / "ckpt")
    assert verified(source, Progress())[0] == []


def _checksum(wanted: int | None = None) -> Checksum:
    return Checksum(crc32(CONTENT) if wanted is None else wanted, len(CONTENT), "x.distcp (weight)", _read)


def _read(at: int, count: int) -> bytes:
    return CONTENT[at : at + count]


@pytest.mark.parametrize(
    "parts",
    [
        [(0, 1_024_000)],
        [(0, 100_000), (100_000, 1_024_000)],
        [(0, 5000), (0, 100_000), (100_000, 500_000), (150_000, 190_000), (500_000, 1_020_000)],  # begun twice; the end
        [(10_000, 500_000), (540_000, 1_000_000)],  # with gaps, as between the tensors of a buffer
    ],
)
def test_what_is_read_in_order_is_compared(parts: list[tuple[int, int]]) -> None:
    right, wrong = _checksum(), _checksum(12345)
    for first, stop in parts[:-1]:
        for checksum in (right, wrong):
            checksum.note(first, memoryview(CONTENT)[first:stop])
    assert not right.is_compared
    first, stop = parts[-1]
    right.note(first, memoryview(CONTENT)[first:stop])
    assert right.is_compared
    with pytest.raises(CheckpointError, match=r"x\.distcp \(weight\) is damaged"):
        wrong.note(first, memoryview(CONTENT)[first:stop])


def test_what_is_read_out_of_order_is_not_mistaken_for_damage() -> None:
    found = _checksum()
    for first, stop in ((512_000, 1_024_000), (900_000, 1_024_000), (0, 512_000), (512_001, 512_002), (100, 200)):
        found.note(first, memoryview(CONTENT)[first:stop])
    assert not found.is_compared
    found.note(512_002, memoryview(CONTENT)[512_002:])
    assert found.is_compared


def test_the_rest_is_read_at_the_end_of_what_was_used() -> None:
    unused, right, wrong = _checksum(12345), _checksum(), _checksum(12345)
    unused.finish()
    for found in (right, wrong):
        found.note(128_000, memoryview(CONTENT)[128_000:130_000])
    right.finish()
    assert right.is_compared
    with pytest.raises(CheckpointError, match="is damaged"):
        wrong.finish()


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    """``torch.serialization.set_crc32_options(False)`` makes torch write zeros instead."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(50_000)}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert {info.CRC for info in archive.infolist()} == {0}
    assert torch.equal(torch_archive.load(Files(tmp_path), "x.pt")["a"], torch.arange(50_000))
