"""The flat buffers that a ``torch_dist`` checkpoint has, before anything is known of their content."""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from hp_muon_plugin.checkpoint import lazy, torch_archive
from hp_muon_plugin.checkpoint.dcp_files import DcpFolder
from hp_muon_plugin.checkpoint.lazy import Lazy
from hp_muon_plugin.checkpoint.safe_pickle import Stored
from hp_muon_plugin.errors import CheckpointError

BUCKET = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.(dtype_.+)"
    r"\.bucket_idx_(\d+)\.([a-z0-9_]+)\Z"
)
GATHERED = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.param_state(?:/.*)?\Z")


@dataclass(frozen=True, slots=True)
class StoredBuffer:
    """A buffer of the file.

    Attributes:
        chain: Index of its optimizer; None without chain.
        group: Number of the model-parallel rank among those of its optimizer.
        number: Its number on the rank.
        kinds: Flat tensors of each kind, one for each bucket.
        keys: Key of each, for the plan.
        is_whole: Whether buckets lie one after another in one tensor.
        where: For messages.
    """

    chain: int | None
    group: int
    number: int
    kinds: dict[str, list[Lazy]]
    keys: dict[str, list[str]]
    is_whole: bool
    where: str

    @property
    def lengths(self) -> list[int]:
        """Elements of each bucket."""
        return [flat.shape[0] for flat in self.kinds["param"]]


def stored_buffers(folder: DcpFolder) -> list[StoredBuffer]:
    """All flat buffers of a checkpoint.

    Args:
        folder: The checkpoint.

    Raises:
        CheckpointError: If one holds something else.
    """
    return [*_bucketed(folder), *_gathered(folder)]


def _bucketed(folder: DcpFolder) -> Iterator[StoredBuffer]:
    found: dict[tuple[int | None, int, int, str], dict[str, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
    for key in folder.tensors:
        match = BUCKET.match(key)
        if match:
            chain = None if match[1] is None else int(match[1])
            found[chain, int(match[2]), int(match[3]), match[4]][match[6]][int(match[5])] = key
    for (chain, group, number, dtype), kinds in sorted(found.items(), key=lambda item: str(item[0])):
        where = f"{folder.path}: buffer {number} {dtype} of optimizer {chain or 0}, group {group}"
        keys = {kind: [each[index] for index in sorted(each)] for kind, each in kinds.items()}
        flats = {kind: [lazy.in_dcp(folder, key) for key in each] for kind, each in keys.items()}
        yield StoredBuffer(chain, group, number, flats, keys, False, where)


def _gathered(folder: DcpFolder) -> Iterator[StoredBuffer]:
    """The whole state of a rank as one object, of which only the description is read here."""
    for key, piece in folder.objects.items():
        match = GATHERED.match(key)
        if not match or piece is None:
            continue
        archive = torch_archive.Archive(folder.files, piece.file, piece.start, piece.length, key)
        value = archive.value[0] if isinstance(archive.value, list) and archive.value else archive.value
        if not isinstance(value, dict) or not value.get("buckets_coalesced"):
            raise CheckpointError(f"{folder.path}: {key} is no state of a distributed optimizer")
        for number in sorted(index for index in value if isinstance(index, int)):
            (tensors,) = value[number].values()
            flats = {
                kind: [lazy.in_archive(folder.files, archive.located(item), f"{kind} of buffer {number} of {key}")]
                for kind, item in tensors.items()
                if isinstance(item, Stored)
            }
            chain = None if match[1] is None else int(match[1])
            where = f"{folder.path}: buffer {number} of {key}"
            yield StoredBuffer(chain, int(match[2]), number, flats, {kind: [key] for kind in flats}, True, where)
