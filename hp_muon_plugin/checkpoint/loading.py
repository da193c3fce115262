"""Finding a checkpoint to go on from, and reading each rank's chunks of it."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hp_muon_plugin.checkpoint.agreement import Team
from hp_muon_plugin.checkpoint.canonical import RunState
from hp_muon_plugin.checkpoint.folders import MANIFEST, clean, named_checkpoint, to_go_on_from
from hp_muon_plugin.checkpoint.manifest import (
    Manifest,
    check_files,
    hashed,
    parse_manifest,
    read_manifest,
    with_tensors,
)
from hp_muon_plugin.checkpoint.parts import Part
from hp_muon_plugin.checkpoint.torch_files import Reader, ReadPlanner
from hp_muon_plugin.errors import CheckpointError, DamageError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """A whole checkpoint.

    Attributes:
        folder: Where it is.
        manifest: What it holds.
    """

    folder: Path
    manifest: Manifest


def open_checkpoint(folder: Path, team: Team, *, verify: bool = True) -> Found:
    """Open one checkpoint. All ranks call it.

    Args:
        folder: The checkpoint, or a folder of checkpoints, of which the tracker names one.
        team: The ranks.
        verify: Compare hashes of all files, each on one rank.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: On every rank, if it is not whole.
    """
    what = f"opening {folder}"
    chosen = team.first(what, lambda: named_checkpoint(folder))
    return _opened(chosen, team, verify=verify)


def open_latest(save: Path, team: Team, *, verify: bool = True) -> Found | None:
    """Open the checkpoint to go on from: the one that the tracker names, or before it the last whole one.

    All ranks call it. What killed saves left is removed.

    Args:
        save: Folder of all checkpoints of a run; it need not exist.
        team: The ranks.
        verify: As for :func:`open_checkpoint`.

    Returns:
        The checkpoint; None if there is none at all.

    Raises:
        CheckpointError: On every rank, if there are checkpoints and none is whole.
    """
    candidates = team.first(f"looking for checkpoints in {save}", lambda: _candidates(save))
    failures = []
    for folder in candidates:
        try:
            found = _opened(folder, team, verify=verify)
        except CheckpointError as error:
            failures.append(str(error))
            if team.is_first:
                logger.warning("%s is not whole, so an earlier checkpoint is looked for: %s", folder, error)
            continue
        if failures and team.is_first:
            logger.warning("going on from %s, not from %s", found.folder, candidates[0])
        return found
    if not candidates:
        return None
    raise CheckpointError(
        f"{save}: none of {len(candidates)} checkpoints is whole; the newest: {failures[0]}\n"
        "  fix: set checkpoint.resume=null to begin again, with another checkpoint.save"
    )


def read(found: Found, parts: Sequence[Part], team: Team) -> None:
    """Read this rank's chunks into its memory. All ranks call it.

    Args:
        found: The checkpoint.
        parts: What this rank wants; each name once. Values are cast to the types of its memory.
        team: The ranks.

    Raises:
        CheckpointError: On every rank, if something is missing or damaged, naming file and tensor.
    """

    wanted = {part.name: part for part in parts if part.numel}
    assert len(wanted) == sum(bool(part.numel) for part in parts), "a tensor is read twice"
    team.all(f"reading {found.folder}", lambda: _read(found, wanted))


def read_state(found: Found, wanted: Callable[[str], bool]) -> RunState:
    """The run state with those of its tensors that this rank wants.

    Args:
        found: The checkpoint.
        wanted: Of a tensor's name, as ``random/rank0/torch``: whether to read it.

    Returns:
        The run state; references stand for what is not read.

    Raises:
        CheckpointError: If something is damaged.
    """
    held: dict[str, torch.Tensor] = {}

    def target(name: str) -> torch.Tensor:
        info = found.manifest.tensors.get(name)
        if info is None:
            raise DamageError(f"{found.folder / MANIFEST}: refers to {name}, which is not stored")
        held[name] = torch.empty(info.shape, dtype=info.dtype)
        return held[name]

    refs = [name for name in found.manifest.tensors if wanted(name)]
    parts = {name: Part.whole(name, target(name)) for name in refs}
    _read(found, parts)
    return with_tensors(found.manifest.state, lambda name: held.get(name, torch.empty(0)))


def _read(found: Found, parts: dict[str, Part]) -> None:
    """Plan and read alone: what one rank reads does not depend on the others."""
    if not parts:
        return
    reader, planner = Reader(found.folder, found.manifest), ReadPlanner()
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner.set_up_planner(parts, metadata, is_coordinator=True)
    plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    (plan,) = reader.prepare_global_plan(plans)
    reader.read_data(planner.finish_plan(plan), planner).wait()


def _candidates(save: Path) -> list[Path]:
    clean(save)
    return to_go_on_from(save)


def _opened(folder: Path, team: Team, *, verify: bool) -> Found:
    what = f"opening {folder}"

    def text_of_whole() -> str:
        manifest = read_manifest(folder)
        check_files(folder, manifest)
        return (folder / MANIFEST).read_text(encoding="utf-8")

    manifest = parse_manifest(team.first(what, text_of_whole), folder / MANIFEST)
    if verify:
        team.all(what, lambda: _verify(folder, manifest, team))
    return Found(folder, manifest)


def _verify(folder: Path, manifest: Manifest, team: Team) -> None:
    for number, (name, info) in enumerate(manifest.files.items()):
        if number % team.size == team.rank and hashed(folder / name, info.algorithm) != info:
            raise DamageError(f"{folder / name}: is damaged, its bytes are not those that were written")
