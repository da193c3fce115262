"""Files of one rank of a legacy Megatron checkpoint."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_muon_plugin.checkpoint import lazy, torch_archive
from hp_muon_plugin.checkpoint.files import Files
from hp_muon_plugin.checkpoint.formats import names
from hp_muon_plugin.checkpoint.lazy import Lazy
from hp_muon_plugin.checkpoint.run_values import plain
from hp_muon_plugin.checkpoint.safe_pickle import Stored
from hp_muon_plugin.errors import CheckpointError, DamageError

MODEL_FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?\Z")


@dataclass(slots=True)
class RankFile:
    """One rank's files, described; tensors stay where they are.

    Attributes:
        files: Files of the checkpoint.
        folder: Name of the rank's folder.
        tensor: Its tensor-parallel rank.
        pipeline: Its pipeline rank.
        expert: Its expert-parallel rank.
        archive: Its ``model_optim_rng.pt``.
        args: Megatron's arguments, plain.
        chunks: Tensors of each model chunk by module name, in the model's order.
    """

    files: Files
    folder: str
    tensor: int
    pipeline: int
    expert: int
    archive: torch_archive.Archive
    args: dict[str, Any]
    chunks: list[dict[str, Lazy]]

    @property
    def value(self) -> dict[str, Any]:
        """What ``model_optim_rng.pt`` holds."""
        found: dict[str, Any] = self.archive.value
        return found

    @property
    def where(self) -> str:
        """Path of the model file, for messages."""
        return str(self.files.folder / self.folder / MODEL_FILE)

    @property
    def expert_ranks(self) -> int:
        """Expert-parallel size."""
        return int(self.args.get("expert_model_parallel_size") or 1)

    @property
    def expert_tensor_ranks(self) -> int:
        """Tensor-parallel size of experts."""
        size = self.args.get("expert_tensor_parallel_size") or self.args.get("tensor_model_parallel_size") or 1
        return int(size)

    @property
    def tensors(self) -> range:
        """Tensor-parallel ranks."""
        return range(int(self.args.get("tensor_model_parallel_size") or 1))

    def siblings(self) -> list[str]:
        """Folders of all expert-parallel ranks of its tensor and pipeline rank, in order."""
        if self.expert_ranks == 1:
            return [self.folder]
        stem = self.folder.rpartition("_")[0]
        return [f"{stem}_{expert:03d}" for expert in range(self.expert_ranks)]

    def tensor_of(self, stored: Stored, what: str) -> Lazy:
        """A tensor of the model file."""
        return lazy.in_archive(self.files, self.archive.located(stored), what)

    def filled(self, key: str) -> Any:
        """A value of the model file with its tensors read."""
        return torch_archive.filled(self.value.get(key), self.files, self.archive, key)


def rank_files(files: Files, path: Path) -> list[RankFile]:
    """Describe all ranks.

    Args:
        files: Files of the checkpoint.
        path: Folder of the iteration.

    Returns:
        Ranks ordered by pipeline, expert and tensor rank.

    Raises:
        CheckpointError: If there are none, or one that the arguments ask for is missing.
    """
    folders = sorted(item.name for item in path.iterdir() if _FOLDER.match(item.name))
    if not folders:
        raise CheckpointError(f"{path} has no mp_rank_* folder")
    first = torch_archive.Archive(files, f"{folders[0]}/{MODEL_FILE}")
    args = plain(first.value.get("args")) if isinstance(first.value, dict) and "args" in first.value else {}
    pipelines = int(args.get("pipeline_model_parallel_size") or 1)
    experts = int(args.get("expert_model_parallel_size") or 1)
    found = [_rank(files, folder, pipelines, experts) for folder in folders]
    _check_complete(path, found, args, pipelines, experts)
    return sorted(found, key=lambda rank: (rank.pipeline, rank.expert, rank.tensor))


def _rank(files: Files, folder: str, pipelines: int, experts: int) -> RankFile:
    match = _FOLDER.match(folder)
    assert match is not None
    numbers = [int(number) for number in match.groups()[1:] if number is not None]
    expected = (pipelines > 1) + (experts > 1)
    if len(numbers) != expected:
        raise CheckpointError(
            f"{files.folder / folder}: with pipeline size {pipelines} and expert size {experts}, as its arguments say, "
            f"a name has {expected} numbers after the tensor rank\n  fix: restore the folder's name"
        )
    pipeline = numbers.pop(0) if pipelines > 1 else 0
    archive = torch_archive.Archive(files, f"{folder}/{MODEL_FILE}")
    if not isinstance(archive.value, dict):
        raise DamageError(f"{files.folder / folder / MODEL_FILE} holds no dict")
    args = plain(archive.value["args"]) if "args" in archive.value else {}
    rank = RankFile(files, folder, int(match[1]), pipeline, numbers.pop(0) if experts > 1 else 0, archive, args, [])
    rank.chunks = [_chunk(rank, key) for key in _model_keys(archive.value, rank.where)]
    return rank


def _model_keys(value: dict[str, Any], where: str) -> list[str]:
    if "model" in value:
        return ["model"]
    found = [f"model{number}" for number in range(len(value)) if f"model{number}" in value]
    if not found:
        raise CheckpointError(f"{where} has no model\n  fix: give the folder of a whole checkpoint")
    return found


def _chunk(rank: RankFile, key: str) -> dict[str, Lazy]:
    model = rank.value[key]
    if not isinstance(model, dict):
        raise DamageError(f"{rank.where}: {key} is no dict")
    return {
        names.bare(str(name)): rank.tensor_of(value, f"{key}.{name}")
        for name, value in model.items()
        if isinstance(value, Stored) and not str(name).endswith(names.EXTRA_STATE)
    }


def _check_complete(path: Path, found: list[RankFile], args: dict[str, Any], pipelines: int, experts: int) -> None:
    tensors = int(args.get("tensor_model_parallel_size") or 1)
    for pipeline in range(pipelines):
        there = [rank for rank in found if rank.pipeline == pipeline]
        for axis, count, seen in (
            ("tensor", tensors, {rank.tensor for rank in there}),
            ("expert", experts, {rank.expert for rank in there}),
        ):
            missing = sorted(set(range(count)) - seen)
            if missing:
                example = [f"{missing[0] if axis == 'tensor' else 0:02d}"]
                example += [f"{pipeline:03d}"] if pipelines > 1 else []
                example += [f"{missing[0] if axis == 'expert' else 0:03d}"] if experts > 1 else []
                raise DamageError(
                    f"{path}: no folder of {axis}-parallel rank {missing[0]} on pipeline rank {pipeline}; there should "
                    f"be mp_rank_{'_'.join(example)}/{MODEL_FILE}\n  fix: copy the folders of all ranks"
                )
