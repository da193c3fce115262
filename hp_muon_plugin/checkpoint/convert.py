"""Conversion of a checkpoint from any format to any other: planned, bounded in memory, atomic, verified."""

import hashlib
import json
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import hp_muon_plugin
from hp_muon_plugin.checkpoint import formats, placing
from hp_muon_plugin.checkpoint.canonical import Loss, Source, Target, Writer
from hp_muon_plugin.checkpoint.folders import write_durably
from hp_muon_plugin.checkpoint.hashing import HashingSource, compare_rest
from hp_muon_plugin.checkpoint.output_check import Report, compare_output
from hp_muon_plugin.checkpoint.progress import Progress
from hp_muon_plugin.checkpoint.syncing import Syncing
from hp_muon_plugin.checkpoint.verify import Difference, masters, read_again, sampled_masters
from hp_muon_plugin.errors import CheckpointError, ConfigError, DamageError, VerifyError

REPORT = "conversion.json"
BUDGET = 2 * 2**30
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Plan:
    """What a conversion will do.

    Attributes:
        source: The opened checkpoint.
        writer: Writer of the target format.
        target: How it writes.
        to: Name of the target format.
        losses: What the target cannot hold.
        nbytes: Bytes of all tensors.
    """

    source: Source
    writer: Writer
    target: Target
    to: str
    losses: tuple[Loss, ...]
    nbytes: int


def plan(source: Source, to: str, target: Target, flags: Collection[str] = ()) -> Plan:
    """Find out what a conversion would do; nothing is written.

    Args:
        source: The opened checkpoint.
        to: Target format.
        target: How it is written.
        flags: Fields of it that the user named, to refuse those that mean nothing in the format.

    Raises:
        ConfigError: If an option or flag is none of the format's, or the source cannot be written so at all.
        CheckpointError: If the source is damaged in a way that shows in a sample.
    """
    writer = formats.writer(to)
    formats.check_choices(to, flags, target.options)
    refuse(source, list(sampled_masters(source)))
    losses = list(writer.losses(source, target))
    unclear = source.state().model.get("unclear_groups")
    if unclear:
        text = f"param-group values of {len(unclear)} parameters, of which the source does not tell the group"
        losses.append(Loss(text))
    nbytes = sum(info.nbytes for info in source.tensors().values())
    return Plan(source, writer, target, to, tuple(losses), nbytes)


def refuse(source: Source, found: list[Difference]) -> None:
    """Refuse a source whose masters are not those of its weights.

    Args:
        source: The checkpoint.
        found: What differs.

    Raises:
        CheckpointError: If anything does.
    """
    if found:
        more = f"\n  and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        shown = "".join(f"\n  {item}" for item in found[:_SHOWN])
        raise DamageError(
            f"{source.path} is corrupt: {len(found)} float32 masters do not belong to their weights{shown}{more}\n"
            "  megatron-core 0.15 to 0.19 writes such files as fully_reshardable with several buckets\n"
            "  fix: take another checkpoint of the run; or convert its weights alone with --weights-only"
        )


def convert(
    found: Plan,
    dst: Path,
    *,
    budget: int = BUDGET,
    jobs: int = 1,
    drop: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Convert.

    Args:
        found: The plan.
        dst: Destination as the user names it.
        budget: Bytes of tensors in memory at any time, about.
        jobs: Threads that read and write, and read the output again.
        drop: Whether to go on although something is lost.
        force: Whether to replace a checkpoint that is there.
        progress: Told how far it is.

    Returns:
        What was done; it stands in the output as ``conversion.json`` too.

    Raises:
        ConfigError: If something is lost without ``drop``, or the destination is taken.
        CheckpointError: If the source is damaged or the disk full. The destination is as it was.
        VerifyError: If the output, read again, is not the source. The destination is as it was.
    """
    if found.losses and not drop:
        lost = "\n  ".join(found.losses)
        raise ConfigError(
            "--to", found.to, f"cannot hold all of the source:\n  {lost}\n ", "pass --drop to go on without"
        )
    progress = progress or Progress()
    started = time.monotonic()
    state = found.source.state()
    place = placing.destination(dst, state.iteration, is_tracked=formats.FORMATS[found.to].is_tracked)
    what = _what(found)
    if not force and placing.finish(place, what):
        progress.note(f"{place.final} was whole already: an earlier conversion had been killed just before its end")
        return _finished(place.final)
    placing.check(place, found.source.path, found.nbytes, force=force)
    report = Report(nbytes=found.nbytes, folder=place.final)
    with _one_thread_each(), placing.placed(place, progress.note, what) as folder:
        source, one_at_a_time = HashingSource(found.source, budget), threading.Lock()
        with Syncing(folder, found.nbytes) as syncing:

            def written(nbytes: int) -> None:
                with one_at_a_time:
                    progress.advance(nbytes)
                    syncing.advance(nbytes)

            progress.begin("write", found.nbytes)
            found.writer.write(source, folder, replace(found.target, jobs=jobs), written, budget)
            compare_rest(source)
            syncing.start()
            progress.begin("verify", found.nbytes)
            with _opened(folder, found.to) as output:
                again = HashingSource(output, budget // max(1, jobs))
                differ = _masters_that_differ(source, read_again(again, source.tensors(), jobs, progress.advance))
                refuse(source, differ)
                compare_output(source, again, report, found.losses)
        report.seconds = time.monotonic() - started
        report.body = _body(found, report)
        write_durably(folder / REPORT, json.dumps(report.body, indent=1))
    return report


def _what(found: Plan) -> str:
    """Tells a conversion from any other, a source that was written to since among them."""
    state, folder = found.source.state(), found.source.path
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    tensors = [(str(key), str(info)) for key, info in found.source.tensors().items()]
    told = replace(found.target, jobs=1), found.to, state.iteration, state.vocab_size, str(folder.resolve())
    return hashlib.sha256(repr((told, stats, tensors)).encode()).hexdigest()


def _finished(folder: Path) -> Report:
    body = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    return Report(
        tensors=body["xxh3_128"],
        dropped=body["dropped"],
        changed=body["changed"],
        written=body["xxh3_128_of_changed"],
        nbytes=body["bytes"],
        seconds=body["seconds"],
        folder=folder,
        body=body,
    )


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Torch's operations on one thread: others read and write meanwhile, and OpenMP's would wait for them spinning."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _opened(folder: Path, to: str) -> Iterator[Source]:
    try:
        output = formats.open_checkpoint(folder, to)
    except CheckpointError as error:
        raise VerifyError(f"the output cannot be read again: {error}") from error
    try:
        yield output
    finally:
        output.close()


def _masters_that_differ(source: HashingSource, found: list[Difference]) -> list[Difference]:
    """Masters of the output are as good as the source's: their bytes turn out to be equal, and are in memory still."""
    copies = getattr(source, "copies", None)
    has_copies = copies is not None and any(True for _ in copies())
    return found or (list(masters(source, source.piece_bytes)) if has_copies else [])


def _body(found: Plan, report: Report) -> dict[str, Any]:
    state = found.source.state()
    return {
        "hp_muon_plugin": hp_muon_plugin.__version__,
        "torch": torch.__version__,
        "source": str(found.source.path),
        "source_format": found.source.format,
        "format": found.to,
        "iteration": state.iteration,
        "bytes": report.nbytes,
        "seconds": round(report.seconds, 3),
        "losses": list(found.losses),
        "dropped": report.dropped,
        "changed": report.changed,
        "random_state": "copied"
        if state.random and not any("random" in line for line in found.losses)
        else "not copied",
        "xxh3_128": report.tensors,
        "xxh3_128_of_changed": report.written,
    }
