"""Writer of HyperParallel's own checkpoints."""

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hp_muon_plugin.checkpoint import lazy
from hp_muon_plugin.checkpoint.canonical import Key, Kind, Loss, Source, Target
from hp_muon_plugin.checkpoint.formats.base import (
    RECORD,
    check_momentum,
    groups_of,
    kinds_by_name,
    masters_round_to_weights,
    momentum_of,
    record,
)
from hp_muon_plugin.checkpoint.formats.fsdp2_write import state_tensors
from hp_muon_plugin.checkpoint.formats.hyper_parallel import METADATA, NAME
from hp_muon_plugin.checkpoint.formats.spelling import prediction
from hp_muon_plugin.checkpoint.lazy import Lazy
from hp_muon_plugin.checkpoint.megatron_names import registration_order
from hp_muon_plugin.checkpoint.step_counts import inexact
from hp_muon_plugin.checkpoint.torch_archive_stream import write_archive
from hp_muon_plugin.errors import ConfigError

_PACKAGE = "hyper_parallel.core.checkpoint"
_VERSION = "1.0"


class HyperParallelWriter:
    """Writes one file for each rank of the wanted world, cut evenly along dimension 0.

    HyperParallel reads even shards only. Option ``world`` is the number of ranks that share parameters, 1 if not
    given: HSDP replicas do not count, because one of them is read.
    """

    format = NAME

    def losses(self, source: Source, target: Target) -> list[Loss]:
        """As :class:`~hp_muon_plugin.checkpoint.canonical.Writer`."""
        world = _world(target)
        for key, info in source.tensors().items():
            if info.shape and info.shape[0] % world:
                raise ConfigError(
                    "--option world",
                    world,
                    f"{key} has {info.shape[0]} rows, which do not divide; HyperParallel reads even shards only",
                    "choose a number of ranks that divides the rows of every tensor, or 1",
                )
        check_momentum(source, target, None)
        return inexact(source.state())

    def write(self, source: Source, folder: Path, target: Target, count: Callable[[int], None], budget: int) -> None:
        """As :class:`~hp_muon_plugin.checkpoint.canonical.Writer`."""
        world, state = _world(target), source.state()
        tensors = dict(_tensors(source, target))
        for rank in range(world):
            share = {key: _share(value, rank, world) for key, value in tensors.items() if value.shape or rank == 0}
            write_archive(folder / _file(rank), share, count, target.jobs)
        order = sorted(kinds_by_name(source), key=registration_order)
        groups, spell = (
            groups_of(state.hyper, [name for name in order if name in state.hyper]),
            prediction(source, target),
        )
        objects: dict[str, Any] = {
            "optim.param_groups": [{**values, "params": list(map(spell, names))} for values, names in groups],
            "lr_scheduler": state.scheduler,
            "iteration": state.iteration,
        }
        sizes = {key: _put(folder, key, pickle.dumps(value, protocol=4)) for key, value in objects.items()}
        write_archive(folder / _object_file(RECORD), record(source, momentum_of(source, target, None)), count)
        sizes[RECORD] = (folder / _object_file(RECORD)).stat().st_size
        _put_file(folder / METADATA, _pickled(_metadata(tensors, sizes, world)))


def _tensors(source: Source, target: Target) -> Iterator[tuple[str, Lazy]]:
    kinds, spell = kinds_by_name(source), prediction(source, target)
    for name in sorted(kinds, key=registration_order):
        if Kind.buffer in kinds[name]:
            yield f"model.{spell(name)}", lazy.canonical(source, Key(name, Kind.buffer))
        else:
            yield f"model.{spell(name)}", masters_round_to_weights(source, name)
    for name in sorted(kinds, key=registration_order):
        for kind, value in state_tensors(source, target, name, [name], kinds):
            yield f"optim.state.{spell(name)}.{kind}", value


def _world(target: Target) -> int:
    return int(target.options.get("world", "1"))


def _share(value: Lazy, rank: int, world: int) -> Lazy:
    if not value.shape:
        return value
    rows = value.shape[0] // world
    return lazy.cut_rows(value, rank * rows, (rank + 1) * rows)


def _file(rank: int) -> str:
    return f"_rank{rank}_.safetensors"


def _object_file(key: str) -> str:
    return f"{key}_rank0.bytes"


def _put(folder: Path, key: str, content: bytes) -> int:
    _put_file(folder / _object_file(key), content)
    return len(content)


def _put_file(path: Path, content: bytes) -> None:
    with open(path, "xb") as file:
        file.write(content)


class _Of:
    """A value of one of HyperParallel's dataclasses, which need not be installed here."""

    def __init__(self, module: str, name: str, **values: Any) -> None:
        self.module = f"{_PACKAGE}.{module}"
        self.name = name
        self.values = values


def _metadata(tensors: dict[str, Lazy], sizes: dict[str, int], world: int) -> _Of:
    described: dict[str, _Of] = {key: _Of("metadata", "BytesStorageMetadata") for key in sizes}
    stored: list[tuple[_Of, _Of]] = []
    for key, value in tensors.items():
        ranks = range(world if value.shape else 1)
        rows = value.shape[0] // world if value.shape else 0
        chunks = [_chunk(rank * rows, rows, value.shape) for rank in ranks]
        properties = _Of(
            "metadata", "TensorProperties", dtype=str(value.dtype), requires_grad=False, memory_format=None
        )
        described[key] = _Of(
            "metadata", "TensorStorageMetadata", properties=properties, size=tuple(value.shape), chunks=chunks
        )
        stored += [
            (_index(key, chunk.values["offsets"], rank), _place(_file(rank), -1))
            for rank, chunk in zip(ranks, chunks, strict=True)
        ]
    stored += [(_index(key, (), None), _place(_object_file(key), size)) for key, size in sizes.items()]
    return _Of(
        "metadata",
        "Metadata",
        state_dict_metadata=described,
        planner_data=None,
        storage_data=stored,
        version=_VERSION,
    )


def _chunk(first: int, rows: int, shape: tuple[int, ...]) -> _Of:
    offsets = (first, *(0 for _ in shape[1:])) if shape else ()
    sizes = (rows, *shape[1:]) if shape else ()
    return _Of("metadata", "ChunkStorageMetadata", offsets=offsets, sizes=sizes)


def _index(key: str, offset: tuple[int, ...], index: int | None) -> _Of:
    return _Of("metadata", "MetadataIndex", fqn=key, offset=offset, index=index)


def _place(file: str, length: int) -> _Of:
    return _Of("storage", "StorageInfo", relative_path=file, offset=0, length=length)


def _pickled(value: _Of) -> bytes:
    """A pickle of such values. Written out by hand, because pickle wants to import the classes that it names."""
    return pickle.PROTO + b"\x02" + b"".join(_codes(value)) + pickle.STOP


def _codes(value: Any) -> Iterator[bytes]:
    if isinstance(value, _Of):
        yield pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode()
        yield pickle.EMPTY_TUPLE + pickle.NEWOBJ
        if value.values:
            yield from _codes(value.values)
            yield pickle.BUILD
    elif isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], tuple)):
        yield pickle.EMPTY_DICT + pickle.MARK
        for key, item in value.items() if isinstance(value, dict) else value:
            yield from _codes(key)
            yield from _codes(item)
        yield pickle.SETITEMS
    elif isinstance(value, list):
        yield pickle.EMPTY_LIST + pickle.MARK
        for item in value:
            yield from _codes(item)
        yield pickle.APPENDS
    elif isinstance(value, tuple):
        yield pickle.MARK
        for item in value:
            yield from _codes(item)
        yield pickle.TUPLE
    else:
        yield pickle.dumps(value, protocol=2)[2:-1]
