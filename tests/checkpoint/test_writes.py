"""Threads that read and write: the same files every time, errors that are heard, work that can be given up."""

import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from hp_muon_plugin.bench.made_up import MadeUp, gpt
from hp_muon_plugin.checkpoint.canonical import Info, Key, Kind, RunState, Target
from hp_muon_plugin.checkpoint.convert import REPORT, convert, plan
from hp_muon_plugin.checkpoint.dcp_write import DcpWriter
from hp_muon_plugin.checkpoint.hashing import BLOCK_BYTES, HASH, HashingSource
from hp_muon_plugin.checkpoint.lazy import Lazy
from hp_muon_plugin.checkpoint.torch_archive import raw_bytes
from hp_muon_plugin.checkpoint.writes import Writes
from hp_muon_plugin.errors import CheckpointError

KEY = Key("x", Kind.weight)
FORMATS = ("hp", "torch_dist", "torch", "fsdp_dtensor", "fsdp2", "torch_dcp", "hyper_parallel")


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("to", FORMATS)
def test_threads_write_the_same_files_from_run_to_run(to: str, tmp_path: Path) -> None:
    found = []
    for number in range(2):
        done = convert(
            plan(gpt(24, hidden=256), to, Target(shard_bytes=2**23)), tmp_path / str(number), jobs=3, drop=True
        )
        found.append({name: raw for name, raw in _contents(done.folder).items() if not name.endswith(REPORT)})
    assert len(found[0]) >= 2
    assert {name: HASH(raw).digest() for name, raw in found[0].items()} == {
        name: HASH(raw).digest() for name, raw in found[1].items()
    }


@pytest.mark.parametrize("to", FORMATS)
def test_an_error_in_a_thread_is_heard_and_nothing_is_left(to: str, tmp_path: Path) -> None:
    class Broken(MadeUp):
        def read(self, key: Key, start: int = 0, stop: int | None = None) -> torch.Tensor:
            if key.name.endswith("mlp.linear_fc2.weight") and start:
                raise CheckpointError("the disk is gone")
            return super().read(key, start, stop)

    whole = gpt(60, hidden=512)
    source = Broken(whole.tensors(), whole.state())
    with pytest.raises(CheckpointError, match="the disk is gone"):
        convert(plan(source, to, Target()), tmp_path / "new", jobs=2, drop=True)
    assert not any(tmp_path.iterdir())


def test_threads_have_files_of_their_own(tmp_path: Path) -> None:
    with DcpWriter(tmp_path, jobs=2) as writer:
        for name in "abcd":
            writer.declare(name, (1000,), torch.float32)
            writer.copy(name, Lazy((1000,), torch.float32, lambda a, b: torch.arange(a, b).float()), int, 2**24)
        writer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".metadata", "__0_0.distcp", "__0_1.distcp"]
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("*.distcp"))]
    assert sizes[0] == sizes[1]


def test_work_that_is_given_up_ends_with_the_block_it_is_at() -> None:
    writes, begun, may_go_on = Writes(1), threading.Event(), threading.Event()
    blocks: list[int] = []

    def read(start: int, stop: int) -> torch.Tensor:
        begun.set()
        may_go_on.wait()
        return torch.zeros(stop - start)

    value = Lazy((4 * BLOCK_BYTES,), torch.float32, read)  # 16 blocks
    writes.threads[0].put(partial(list, writes.blocks(value, blocks.append)), value.nbytes)
    begun.wait()
    ending = threading.Thread(target=writes.shut_down)
    ending.start()
    while not writes.is_stopped:
        pass
    may_go_on.set()
    ending.join()
    assert blocks == [BLOCK_BYTES]


def test_bytes_in_memory_wait_for_room() -> None:
    writes, may_go_on = Writes(1, waiting_bytes=10), threading.Event()
    thread = writes.threads[0]
    thread.put(may_go_on.wait, 6, 6)
    late = threading.Thread(target=thread.put, args=(int, 5, 5))
    late.start()
    late.join(0.2)
    assert late.is_alive()
    may_go_on.set()
    late.join()
    writes.finish()
    writes.shut_down()


@pytest.mark.parametrize(
    "cuts", [[(0, 100)], [(0, 40), (39, 70), (65, 100)], [(0, 10), (5, 8), (10, 100)], [(0, 10), (20, 30), (5, 100)]]
)
def test_rows_that_are_read_twice_are_hashed_once(cuts: list[tuple[int, int]]) -> None:
    """Flat buffers cut tensors anywhere: the row at a cut is read for what ends in it and for what begins in it."""
    source = Counted({KEY: Info((100, 3), torch.float32)}, RunState())
    hashing = HashingSource(source, 2**20)
    for start, stop in cuts:
        assert torch.equal(hashing.read(KEY, start, stop), MadeUp.read(source, KEY, start, stop))
    assert hashing.digest(KEY) == HASH(raw_bytes(MadeUp.read(source, KEY))).hexdigest()
    assert source.reads == cuts  # none again for the hash


class Counted(MadeUp):
    """Remembers what was read."""

    def __init__(self, infos: dict[Key, Info], state: RunState) -> None:
        super().__init__(infos, state)
        self.reads: list[tuple[int, int | None]] = []

    def read(self, key: Key, start: int = 0, stop: int | None = None) -> torch.Tensor:
        self.reads.append((start, stop))
        return super().read(key, start, stop)
