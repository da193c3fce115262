"""Parameters in the flat buffers of ``torch_dist`` checkpoints: ``dp_reshardable`` and ``dp_zero_gather_scatter``.

Each model-parallel rank has buffers of its own, of which the file names the number of the rank and no parameter. What
is where follows from the rules by which megatron-core builds ranks, chunks and buffers, and is proved by content: the
rounded master is the stored weight.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from hp_muon_plugin.checkpoint import lazy
from hp_muon_plugin.checkpoint.buckets import Slot, placed
from hp_muon_plugin.checkpoint.canonical import Key, Kind, RunState, Target
from hp_muon_plugin.checkpoint.dcp_files import DcpFolder
from hp_muon_plugin.checkpoint.formats import names
from hp_muon_plugin.checkpoint.formats.base import LazySource
from hp_muon_plugin.checkpoint.formats.flat_layout import Entry, bucket_size, laid, starts_of
from hp_muon_plugin.checkpoint.formats.legacy_plan import Buffer, Plan, Rank, plan
from hp_muon_plugin.checkpoint.formats.stages import INSIDE, PIPELINES
from hp_muon_plugin.checkpoint.formats.torch_dist_buffer_files import StoredBuffer, stored_buffers
from hp_muon_plugin.checkpoint.formats.torch_dist_parts import Joined, Part
from hp_muon_plugin.checkpoint.lazy import Lazy
from hp_muon_plugin.errors import CheckpointError, ConfigError, DamageError

_PROOF_ELEMENTS = 2**14
_SPELLINGS = [{"spec": spec, "experts": experts} for spec in ("local", "te") for experts in ("separate", "grouped")]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a parameter of a rank lies.

    Attributes:
        name: Canonical name.
        tensor: Which of the tensor-parallel ranks that share it.
        slot: Its place in the buffer.
        shape: Its shape on the rank.
    """

    name: str
    tensor: int
    slot: Slot
    shape: tuple[int, ...]

    def lazy(self, flats: Sequence[Lazy]) -> Lazy:
        """It in the buckets of one kind."""
        return lazy.part_of_flat(flats[self.slot.bucket], self.slot.start, self.shape)

    def part(self, keys: Sequence[str], flats: Sequence[Lazy]) -> Joined:
        """The same, with where it lies, for the plan."""
        return Joined(keys[self.slot.bucket], self.slot.start, self.lazy(flats))


@dataclass(slots=True)
class BufferParts:
    """What was found.

    Attributes:
        parts: Readers of state, by kind and name.
        member: Index of the chained optimizer of each name; None without chain.
        bucket_size: Elements at which buckets were closed, where there are several; else None.
    """

    parts: dict[Key, Part] = field(default_factory=dict)
    member: dict[str, int | None] = field(default_factory=dict)
    bucket_size: int | None = None


def read_buffers(
    folder: DcpFolder, args: Mapping[str, Any], weights: Mapping[str, Part], taken: set[str]
) -> BufferParts:
    """Find the parameters of all buffers.

    Args:
        folder: The checkpoint.
        args: Megatron's arguments, plain, for the sizes of the run.
        weights: Readers of the model's weights by canonical name.
        taken: Names whose state is elsewhere.

    Raises:
        CheckpointError: If buffers do not belong to the weights, or a rank's are missing.
    """
    stored = stored_buffers(folder)
    found = BufferParts()
    if not stored:
        return found
    mesh = _Mesh(folder, args, weights, taken)
    pieces: dict[Key, dict[int, Joined]] = {}
    for buffer in stored:
        for place in mesh.placed(buffer, found):
            for kind, flats in buffer.kinds.items():
                key = Key(place.name, str(Kind.main) if kind == "param" else kind)
                pieces.setdefault(key, {}).setdefault(place.tensor, place.part(buffer.keys[kind], flats))
            found.member.setdefault(place.name, buffer.chain)
    for key, parts in pieces.items():
        found.parts[key] = mesh.joined(key, parts)
    return found


class _Mesh:
    """The ranks of the run, with the parameters that each has."""

    def __init__(
        self, folder: DcpFolder, args: Mapping[str, Any], weights: Mapping[str, Part], taken: set[str]
    ) -> None:
        self._folder, self._taken = folder, taken

        def size(name: str) -> int:
            return int(args.get(name) or 1)

        self._target = Target(size("tensor_model_parallel_size"), size(PIPELINES), size("expert_model_parallel_size"))
        self._inside = int(args.get(INSIDE) or self._target.tp)
        lazies = {
            Key(name, Kind.weight): Lazy(part.shape, part.dtype, _reader(part, folder))
            for name, part in weights.items()
        }
        state = RunState(args=dict(args))
        self._source = LazySource("torch_dist", Path(folder.path), lazies, lambda: state, folder)

    @cached_property
    def _plan(self) -> Plan:
        return self._spelt(_SPELLINGS[0])

    def _plans(self) -> Iterator[Plan]:
        """Ranks by each way of naming modules, which decides on their order; the usual one first."""
        yield self._plan
        yield from map(self._spelt, _SPELLINGS[1:])

    def _spelt(self, options: dict[str, str]) -> Plan:
        target = Target(self._target.tp, self._target.pp, self._target.ep, options=options)
        try:
            return plan(self._source, target, expert_tensors=self._inside, rows=False)
        except ConfigError as error:
            raise CheckpointError(
                f"{self._folder.path}: its arguments name sizes that its model does not have, so that buffers of its "
                f"optimizer cannot be told apart: {error}"
            ) from error

    def placed(self, stored: StoredBuffer, found: BufferParts) -> list[_Place]:
        """Every parameter of a buffer."""
        if "param" not in stored.kinds:
            raise CheckpointError(f"{stored.where} has no fp32 masters, without which its parameters are not known")
        for experts in (False, True) if self._target.ep > 1 else (None,):
            rank = self._rank(stored.group, bool(experts))
            for made in self._plans() if rank.pipeline < self._target.pp else ():
                buffers = self._buffers(made, rank, experts, ())
                if stored.number < len(buffers):
                    buffer = buffers[stored.number]
                    places = self._places(made, rank, buffer.names, _by_rules(buffer.entries, stored))
                    if places and all(self._matches(made, rank, place, stored) for place in places):
                        if len(stored.kinds["param"]) > 1 and found.bucket_size is None:
                            found.bucket_size = bucket_size(buffer.entries, stored.lengths)
                        return places
        return self._searched(stored, found)

    def _searched(self, stored: StoredBuffer, found: BufferParts) -> list[_Place]:
        """By content alone: a buffer that has fewer parameters than the rank, or whose rank is not known."""
        made = self._plan
        error = CheckpointError(f"{stored.where} is of a rank that the arguments of the checkpoint do not have")
        is_one = self._target.tp == self._target.pp == self._target.ep == 1
        known = stored.chain is None and is_one
        for experts in (None,) if known else (False, True, None) if is_one else (False, True):
            rank = self._rank(stored.group, bool(experts))
            if stored.is_whole or rank.pipeline >= self._target.pp:
                continue
            buffers = self._buffers(made, rank, experts, found.member if is_one else ())
            owners = {f"{buffer.chunk}/{local}": name for buffer in buffers for local, name in buffer.names.items()}
            numels = {f"{each.chunk}/{local}": numel for each in buffers for local, numel, _ in each.entries}

            def matches(local: str, slot: Slot) -> bool:
                (place,) = self._places(made, rank, owners, {local: slot})  # noqa: B023
                return self._matches(made, rank, place, stored)  # noqa: B023

            try:
                slots = placed(list(reversed(numels)), numels, stored.lengths, matches, stored.where)
            except CheckpointError as failed:
                error = failed
                continue
            return self._places(made, rank, owners, slots)
        raise error

    def _rank(self, group: int, experts: bool) -> Rank:
        """Ranks are numbered by tensor, expert and pipeline rank, the first of them fastest."""
        tp, pp, ep = self._target.tp, self._target.pp, self._target.ep
        if tp == pp == ep == 1:
            return Rank(0, 0, 0)
        if not experts:
            return Rank(group % tp, group // tp, 0)
        rest = group // self._inside
        return Rank(group % self._inside, rest // ep, rest % ep)

    def _buffers(self, made: Plan, rank: Rank, experts: bool | None, placed: Container[str]) -> list[Buffer]:
        def wanted(name: str) -> bool:
            free = name not in self._taken and name not in placed
            return free and (experts is None or names.is_expert(name) == experts)

        return made.buffers(rank, made.members(rank), wanted)

    def _places(
        self, made: Plan, rank: Rank, owners: Mapping[str, str], slots: Mapping[str, Slot] | None
    ) -> list[_Place]:
        found = []
        for local, slot in (slots or {}).items():
            name = owners[local]
            index = rank.tensor % (self._inside if names.is_expert(name) else self._target.tp)
            found.append(_Place(name, index, slot, made.tensor(name, Kind.weight, rank).shape))
        return found

    def _matches(self, made: Plan, rank: Rank, place: _Place, stored: StoredBuffer) -> bool:
        """Whether the first and last rows agree; the whole is compared when it is converted or verified."""
        weight, master = made.tensor(place.name, Kind.weight, rank), place.lazy(stored.kinds["param"])
        rows = weight.shape[0] if weight.shape else 1
        step = max(1, _PROOF_ELEMENTS // max(1, prod(weight.shape[1:])))
        for start, stop in {(0, min(rows, step)), (max(0, rows - step), rows)}:
            rounded, own = master.rows(start, stop).to(weight.dtype), weight.rows(start, stop)
            if not torch.equal(rounded.reshape(-1).view(torch.uint8), own.reshape(-1).view(torch.uint8)):
                return False
        return True

    def joined(self, key: Key, parts: Mapping[int, Joined]) -> Part:
        """A whole tensor from the parts of the tensor-parallel ranks."""
        count = self._inside if names.is_expert(key.name) else self._target.tp
        missing = [index for index in range(count) if index not in parts]
        if missing:
            raise DamageError(
                f"{self._folder.path}: {key.kind} of {key.name} on tensor-parallel rank {missing[0]} is in no buffer"
            )
        first = parts[0]
        cut = self._plan.cut(key.name)
        whole = names.merged([parts[index].lazy for index in range(count)], cut)
        return Joined(first.key, first.first, whole)


def _by_rules(entries: list[Entry], stored: StoredBuffer) -> dict[str, Slot] | None:
    if not stored.is_whole:
        return laid(entries, stored.lengths)
    starts = starts_of(entries, stored.lengths[0])
    return None if starts is None else {name: Slot(0, start) for name, start in starts.items()}


def _reader(part: Part, folder: DcpFolder) -> Any:
    return lambda start, stop: part.read(folder, start, stop)
