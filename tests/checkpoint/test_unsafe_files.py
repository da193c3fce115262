"""Files that are not to be trusted, or are damaged: refused, with file and tensor named, and nothing run."""

import io
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from hp_muon_plugin.checkpoint.dcp_files import DcpFolder
from hp_muon_plugin.checkpoint.dcp_write import DcpWriter
from hp_muon_plugin.checkpoint.formats import open_checkpoint
from hp_muon_plugin.cli.ckpt import run
from hp_muon_plugin.errors import CheckpointError
from tests.checkpoint.fixtures import rewritten, unpacked

NAME = "mcore019_muon_lwl_dense_dp2_dpr"


class Bomb:
    """Would make a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return unpacked(NAME, tmp_path) / "ckpt" / "iter_0000003"


def test_code_in_the_metadata_is_named_and_not_run(folder: Path, tmp_path: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": Bomb(tmp_path / "ran")}))
    with pytest.raises(CheckpointError, match=r"\.metadata: its pickle wants posix\.mkdir"):
        open_checkpoint(folder)
    assert not (tmp_path / "ran").exists()


def test_code_in_the_common_state_is_named_and_not_run(folder: Path, tmp_path: Path) -> None:
    source = open_checkpoint(folder)
    writer_folder = tmp_path / "out"
    writer_folder.mkdir()
    from hp_muon_plugin.checkpoint.canonical import Target
    from hp_muon_plugin.checkpoint.formats import writer

    writer("torch_dist").write(source, writer_folder, Target(), lambda nbytes: None, 2**20)
    torch.save({"args": Bomb(tmp_path / "ran")}, writer_folder / "common.pt")
    with pytest.raises(CheckpointError, match=r"common\.pt .*its pickle wants posix\.mkdir"):
        open_checkpoint(writer_folder)
    assert not (tmp_path / "ran").exists()


def test_attributes_of_known_classes_are_not_reached(tmp_path: Path) -> None:
    """Protocol 4 resolves dotted names: OrderedDict.__init__.__globals__ would open everything."""
    from hp_muon_plugin.checkpoint.safe_pickle import load_values

    raw = b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.__init__\x93."
    with pytest.raises(CheckpointError, match=r"wants collections\.OrderedDict\.__init__"):
        load_values(raw, "some.pt")


def test_a_file_outside_of_the_folder_is_refused(folder: Path) -> None:
    rewritten(folder / ".metadata", lambda raw: raw.replace(b"__0_0.distcp", b"../../x.dist"))
    with pytest.raises(CheckpointError, match=r"names the file '\.\./\.\./x\.dist'"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["/etc/passwd", "..", "a/../../b", "C:\\x", "..\\x", ""])
def test_names_that_lead_out(name: str, tmp_path: Path) -> None:
    from hp_muon_plugin.checkpoint.files import safe_join

    with pytest.raises(CheckpointError, match="not inside the folder"):
        safe_join(tmp_path, name)


def test_a_cut_off_file_is_named_with_a_tensor(folder: Path) -> None:
    path = folder / "__1_0.distcp"
    os.truncate(path, path.stat().st_size - 1000)
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp ends at byte \d+, but .+exp_avg_sq needs bytes"):
        open_checkpoint(folder)


def test_a_missing_file_is_named_with_a_tensor(folder: Path) -> None:
    (folder / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*__1_0\.distcp, which holds \S+: No such file"):
        open_checkpoint(folder)


def test_a_damaged_archive_is_named_with_its_tensor(folder: Path) -> None:
    key = "decoder.final_layernorm.weight"
    piece = DcpFolder(folder).tensors[key].pieces[0]
    assert piece is not None
    with open(folder / piece.file, "r+b") as file:
        file.seek(piece.start)
        file.write(b"\0" * 40)
    with pytest.raises(CheckpointError, match=rf"{piece.file} .{key}. is damaged"):
        DcpFolder(folder).read(key)


def test_a_flipped_bit_is_found_by_verify(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["convert", str(folder), str(tmp_path / "hp"), "--to", "hp"]) == 0
    assert run(["verify", str(tmp_path / "hp")]) == 0
    ours = tmp_path / "hp" / "iter_0000003"
    key = "exp_avg/embedding.word_embeddings.weight"
    located = DcpFolder(ours)._located(key, DcpFolder(ours).tensors[key], 0)
    with open(ours / located.file, "r+b") as file:
        file.seek(located.start + 100)
        byte = file.read(1)[0]
        file.seek(located.start + 100)
        file.write(bytes([byte ^ 1]))
    capsys.readouterr()
    assert run(["verify", str(tmp_path / "hp")]) == 3
    out = capsys.readouterr().out
    assert f"{located.file}: its content is not what was written" in out
    assert f"{located.file} ({key}) is damaged: its bytes do not have the checksum" in out


def test_chunks_that_overlap_or_leave_a_hole_are_named(tmp_path: Path) -> None:
    for name, offsets, message in (
        ("hole", 0, "6 elements of x are in no file"),
        ("overlap", 1, "chunks of x at .* overlap"),
    ):
        (tmp_path / name).mkdir()
        writer = DcpWriter(tmp_path / name)
        writer.declare("x", (4, 3), torch.float32)
        writer.write("x", torch.zeros(2, 3), (0, 0))
        writer.write("x", torch.zeros(2, 3), (2, 0))
        writer.close()
        metadata = tmp_path / name / ".metadata"
        found = pickle.loads(metadata.read_bytes())  # our own file
        if name == "hole":
            del found.state_dict_metadata["x"].chunks[1]
        else:
            chunk = found.state_dict_metadata["x"].chunks[1]
            found.state_dict_metadata["x"].chunks[1] = type(chunk)(torch.Size((offsets, 0)), chunk.sizes)
        metadata.write_bytes(pickle.dumps(found))
        problems = DcpFolder(tmp_path / name).problems()
        assert any(__import__("re").search(message, problem) for problem in problems), problems


def test_elements_written_twice_or_not_at_all_stop_the_writer(tmp_path: Path) -> None:
    writer = DcpWriter(tmp_path)
    writer.declare("x", (4,), torch.float32)
    writer.write("x", torch.zeros(2), (0,))
    with pytest.raises(CheckpointError, match="x has 2 elements unwritten"):
        writer.close()
    assert not (tmp_path / ".metadata").exists()


def test_archives_are_whole_zip_files_that_torch_loads(tmp_path: Path) -> None:
    from hp_muon_plugin.checkpoint.torch_archive import raw_bytes
    from hp_muon_plugin.checkpoint.torch_archive_write import TensorArchive

    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8):
        tensor = (torch.arange(21).view(3, 7) % 5).to(dtype)
        archive = TensorArchive(tensor.dtype, tensor.shape)
        whole = raw_bytes(tensor)
        raw = b"".join(bytes(part) for part in archive.parts([whole[:13], whole[13:]]))
        assert len(raw) == archive.nbytes
        assert zipfile.ZipFile(io.BytesIO(raw)).testzip() is None
        (tmp_path / "x.pt").write_bytes(raw)
        for mapped in (False, True):
            assert torch.equal(torch.load(tmp_path / "x.pt", mmap=mapped, weights_only=True), tensor)


def test_an_unfinished_folder_is_no_checkpoint(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "half", ignore=shutil.ignore_patterns(".metadata", "metadata.json"))
    with pytest.raises(CheckpointError, match=r"no \.metadata: it was never finished"):
        open_checkpoint(tmp_path / "half")
