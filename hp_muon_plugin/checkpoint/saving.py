"""Writing our own checkpoints: all ranks plan together, each writes what it holds, rank 0 publishes.

The order makes a save atomic: files of a folder ``iter_N.hp_muon_partial``, each brought to the disk; ``.metadata``;
``manifest.json``; the folder's final name; the tracker; only then older checkpoints go.

An asynchronous save plans and copies before it returns. A thread writes this rank's files and takes part in no
collective; publishing waits until :meth:`Saver.poll` or :meth:`Saver.wait` finds that all ranks have written.
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from hp_muon_plugin.checkpoint.agreement import Team
from hp_muon_plugin.checkpoint.canonical import Info, RunState
from hp_muon_plugin.checkpoint.folders import MANIFEST, PARTIAL, clean, folder_of, publish, retain, write_durably
from hp_muon_plugin.checkpoint.folders import write_tracker as point_tracker
from hp_muon_plugin.checkpoint.manifest import FileInfo, Manifest, hashed, manifest_text, without_tensors
from hp_muon_plugin.checkpoint.parts import Part
from hp_muon_plugin.checkpoint.snapshot import Snapshot
from hp_muon_plugin.checkpoint.torch_files import METADATA, SavePlanner, Writer
from hp_muon_plugin.errors import CheckpointError

logger = logging.getLogger(__name__)

_Written = tuple[list[WriteResult], dict[str, FileInfo]]
Contents = Callable[[], tuple[list[Part], RunState]]
"""What this rank writes, and its part of the run state: all of it on rank 0, ``hyper``, ``steps`` and ``random``
of its own elsewhere."""


@dataclass(slots=True)
class _Job:
    """A save under way.

    Attributes:
        iteration: Optimizer steps done.
        partial: Where it is written.
        final: Its name when it is whole.
        metadata: What torch will read of it; on rank 0.
        state: Run state of all ranks; on rank 0.
        writer: Of this rank's files.
        began: When it began, seconds.
        blocked_s: How long training waited.
        written: Tells what this rank wrote, or raises why not; None while the thread writes.
        thread: Who writes, if training goes on.
    """

    iteration: int
    partial: Path
    final: Path
    metadata: Metadata | None
    state: RunState | None
    writer: Writer
    began: float
    blocked_s: float = 0.0
    written: Callable[[], _Written] | None = None
    thread: threading.Thread | None = None


class Saver:
    """Saves checkpoints of one run. All methods are collective but the property.

    Args:
        save: Folder of all checkpoints of the run.
        team: The ranks.
        keep: How many of the newest stay; None for all.
        spared: A checkpoint that stays as well, as the one that the run was resumed from.
        asynchronous: Whether training goes on while files are written.
    """

    def __init__(
        self,
        save: Path,
        team: Team,
        *,
        keep: int | None = None,
        spared: Path | None = None,
        asynchronous: bool = False,
    ) -> None:
        self._save, self._team, self._keep, self._asynchronous = save, team, keep, asynchronous
        self._spared = [] if spared is None else [spared]
        self._snapshot = Snapshot()
        self._job: _Job | None = None
        self.last: int | None = None
        """The last iteration that this saver published."""

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way; the same on all ranks."""
        return self._job is not None

    def save(self, iteration: int, contents: Contents) -> None:
        """Save, or begin to; one that is under way is finished first.

        Args:
            iteration: Optimizer steps done.
            contents: Gives what this rank writes.

        Raises:
            CheckpointError: On every rank, if one of them failed.
        """
        self.wait()
        began = time.perf_counter()
        final = folder_of(self._save, iteration)
        partial = final.with_name(final.name + PARTIAL)
        what = f"saving step {iteration} in {self._save}"
        self._team.first(what, lambda: _prepare(self._save, partial))
        writer, planner = Writer(partial), SavePlanner()
        parts: list[Part] = []
        merged: list[Any] = [None, None]

        def plan_here() -> tuple[SavePlan, RunState]:
            found, state = contents()
            plain, tensors = without_tensors(state)
            parts.extend([*found, *(Part.whole(name, tensor) for name, tensor in tensors.items())])
            planner.set_up_planner({part.name: part for part in parts}, writer.storage_meta(), self._team.is_first)
            writer.set_up_storage_writer(self._team.is_first)
            plan = writer.prepare_local_plan(planner.create_local_plan())
            return plan, plain if self._team.is_first else _own(plain)

        gathered = self._team.gathered(what, plan_here)

        def plan_all() -> list[SavePlan]:
            plans, merged[0] = planner.create_global_plan([plan for plan, _ in gathered])
            merged[1] = _merged([state for _, state in gathered])
            return writer.prepare_global_plan(plans)

        plan = planner.finish_plan(self._team.scattered(what, plan_all))
        job = _Job(iteration, partial, final, merged[0], merged[1], writer, began)
        self._job = job
        if self._asynchronous:
            self._team.all(what, lambda: self._snapshot.take(parts))
            job.thread = threading.Thread(target=_write, args=(job, plan, planner), name="hp-muon-checkpoint")
            job.thread.start()
            job.blocked_s = time.perf_counter() - began
        else:
            _write(job, plan, planner)
            self.wait()

    def poll(self, *flags: int) -> tuple[int, ...]:
        """Publish the save under way if all ranks have written. One small reduction; none if nothing is under way.

        Args:
            *flags: Numbers of this rank to reduce with it.

        Returns:
            Their maxima over all ranks.

        Raises:
            CheckpointError: On every rank, if one of them could not write.
        """
        if self._job is None and not flags:
            return ()
        is_writing = self._job is not None and self._job.written is None
        writing, *found = self._team.largest(int(is_writing), *flags)
        if self._job is not None and not writing:
            self.wait()
        return tuple(found)

    def wait(self) -> None:
        """Finish the save under way, if there is one.

        Raises:
            CheckpointError: On every rank, if one of them failed.
        """
        job = self._job
        if job is None:
            return
        self._job = None
        waited = time.perf_counter()
        if job.thread is not None:
            job.thread.join()
        assert job.written is not None
        what = f"saving step {job.iteration} in {self._save}"
        try:
            results = self._team.gathered(what, job.written)
            self._team.first(what, lambda: self._publish(job, results))
        except CheckpointError:
            if self._team.is_first:
                shutil.rmtree(job.partial, ignore_errors=True)
            raise
        self.last = job.iteration
        ended = time.perf_counter()
        blocked = job.blocked_s + ended - (waited if job.thread is not None else job.began)
        if self._team.is_first:
            logger.info(
                "step %d is saved in %s (%.1f s, of which training waited %.2f s)",
                job.iteration,
                job.final,
                ended - job.began,
                blocked,
            )

    def _publish(self, job: _Job, results: Sequence[_Written]) -> None:
        assert job.metadata is not None
        assert job.state is not None
        job.writer.finish(job.metadata, [written for written, _ in results])
        files = {name: info for _, held in results for name, info in held.items()}
        files[METADATA] = hashed(job.partial / METADATA)
        tensors = {
            name: Info(tuple(entry.size), entry.properties.dtype)
            for name, entry in sorted(job.metadata.state_dict_metadata.items())
            if isinstance(entry, TensorStorageMetadata)
        }
        write_durably(job.partial / MANIFEST, manifest_text(Manifest(job.state, tensors, files)))
        publish(job.partial, job.final)
        point_tracker(self._save, job.iteration)
        for gone in retain(self._save, self._keep, [*self._spared, job.final]):
            logger.info("%s is removed: the newest %s stay", gone, self._keep)


def _prepare(save: Path, partial: Path) -> None:
    save.mkdir(parents=True, exist_ok=True)
    for gone in clean(save):
        logger.info("%s, which was never finished, is removed", gone)
    partial.mkdir()


def _write(job: _Job, plan: SavePlan, planner: SavePlanner) -> None:
    """Write this rank's files. Leaves what it wrote, or why not, to whoever asks the job; never raises."""
    try:
        results = job.writer.write_data(plan, planner).value()
        names = sorted({str(result.storage_data.relative_path) for result in results})
        written: _Written = results, {name: hashed(job.partial / name) for name in names}
    except Exception as failure:  # told to all ranks when they ask
        error = failure

        def failed() -> _Written:
            raise error

        job.written = failed
    else:
        job.written = lambda: written


def _own(state: RunState) -> RunState:
    return RunState(hyper=state.hyper, steps=state.steps, random=state.random)


def _merged(states: Sequence[RunState]) -> RunState:
    first = states[0]
    return replace(
        first,
        hyper={name: values for state in states for name, values in state.hyper.items()},
        steps={name: step for state in states for name, step in state.steps.items()},
        random={name: values for state in states for name, values in state.random.items()},
    )
