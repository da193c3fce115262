"""Optimizer state as DistributedOptimizer's flat buckets: ``dp_reshardable``, for one mesh and size of buckets."""

from collections.abc import Callable
from math import gcd
from typing import Any

import torch

from hp_muon_plugin.checkpoint import lazy
from hp_muon_plugin.checkpoint.canonical import Key, Kind, Source, Target
from hp_muon_plugin.checkpoint.dcp_write import DcpWriter
from hp_muon_plugin.checkpoint.formats import names
from hp_muon_plugin.checkpoint.formats.flat_layout import buckets
from hp_muon_plugin.checkpoint.formats.legacy_plan import Buffer, Plan, Rank, plan
from hp_muon_plugin.checkpoint.formats.stages import bucket_size_of, expert_tensors_of
from hp_muon_plugin.checkpoint.formats.torch_dist_common import Member
from hp_muon_plugin.checkpoint.lazy import Lazy
from hp_muon_plugin.errors import ConfigError

_KINDS = (Kind.exp_avg, Kind.exp_avg_sq)


def buffers_plan(source: Source, target: Target) -> Plan:
    """The ranks of the run that will load the buckets.

    Args:
        source: What is written.
        target: Its sizes.

    Raises:
        ConfigError: If it does not divide so, or its optimizer keeps other state than Adam's.
    """
    made = plan(source, target, expert_tensors=expert_tensors_of(source, target))
    if made.has_idle_output:
        raise ConfigError(
            "--pp",
            target.pp,
            "with multi-token prediction and a tied output layer on the last of several stages Megatron itself neither "
            "saves nor loads sharded checkpoints (AssertionError in tie_embeddings_and_output_weights_state_dict)",
            "--pp 1, --to torch, or a stage for multi-token prediction alone: --option "
            "pipeline_model_parallel_layout='Et|tm|L'",
        )
    for name, kinds in made.kinds.items():
        if Kind.buffer not in kinds and set(kinds) - {Kind.weight, Kind.main} != set(_KINDS):
            raise ConfigError(
                "--sharding",
                "dp_reshardable",
                f"wants Adam's two moments of every parameter; {name} has {', '.join(sorted(kinds))}",
                "leave it out",
            )
    infos = source.tensors()
    for name in (names.EMBEDDING, names.OUTPUT):
        info = infos.get(Key(name, Kind.weight))
        if info is not None and made.shapes[name][0] < info.shape[0]:
            raise ConfigError(
                "--sharding",
                "dp_reshardable",
                f"has no place for {info.shape[0] - made.shapes[name][0]} rows of padding of {name}, which Megatron "
                f"does not have with tp={target.tp}",
                "use fully_reshardable, or another --tp",
            )
    return made


def write_buffers(
    source: Source,
    writer: DcpWriter,
    target: Target,
    chain: list[Member],
    lists: list[list[dict[str, Any]]],
    count: Callable[[int], None],
    piece: int,
) -> None:
    """Write the buckets and objects of every rank.

    Args:
        source: What is written.
        writer: Where to.
        target: The mesh.
        chain: Optimizers.
        lists: Param groups of each, with steps.
        count: Called with bytes written.
        piece: Bytes to hold at a time, about.
    """
    made = buffers_plan(source, target)
    ranks = int(source.state().args.get("data_parallel_size") or 1)
    for index, (member, groups) in enumerate(zip(chain, lists, strict=True)):
        owned = frozenset(member.names)
        is_apart = target.ep > 1 and names.is_expert(member.names[0])
        prefix = f"chained_{index}." if len(chain) > 1 else ""
        for number, rank in enumerate(_ranks(made, is_apart)):
            where = f"{prefix}optimizer.distributed.dp_group_idx_{number}"
            found = made.buffers(rank, made.members(rank), owned.__contains__)
            lengths = []
            for place, buffer in enumerate(found):
                size = bucket_size_of(source, target, rank.pipeline, buffer.chunk)
                key = f"{where}.gbuf_idx_{place}.dtype_{(buffer.dtype, torch.float32)}"
                slots, each = buckets(buffer.entries, size)
                lengths.append({(buffer.dtype, torch.float32): each})
                inside: list[list[tuple[int, str]]] = [[] for _ in each]
                for local, slot in slots.items():
                    inside[slot.bucket].append((slot.start, local))
                for kind in (None, *_KINDS):
                    for bucket, length in enumerate(each):
                        name = f"{key}.bucket_idx_{bucket}.{kind or 'param'}"
                        parts = [(at, _state(made, rank, buffer, local, kind)) for at, local in sorted(inside[bucket])]
                        _write_bucket(writer, name, length, parts, count, piece)
            padded = [{key: [_padded(n, ranks) for n in each] for key, each in one.items()} for one in lengths]
            writer.add_object(f"{where}.optimizer/shard_0_1", [{"param_groups": groups}])
            writer.add_object(f"{where}.per_bucket_numel/shard_0_1", [padded])
            writer.add_object(f"{where}.per_bucket_numel_unpadded/shard_0_1", [lengths])


def _ranks(made: Plan, experts: bool) -> list[Rank]:
    """Model-parallel ranks of an optimizer, in the order of their numbers."""
    if not experts:
        return [Rank(t, p, 0) for p in range(made.target.pp) for t in range(made.target.tp)]
    inside, experts_of = range(made.expert_tensors), range(made.target.ep)
    return [Rank(t, p, e) for p in range(made.target.pp) for e in experts_of for t in inside]


def _padded(length: int, ranks: int) -> int:
    """A bucket's length with the padding that lets the data-parallel ranks share it."""
    unit = ranks * 128 // gcd(ranks, 128)
    return -(-length // unit) * unit


def _state(made: Plan, rank: Rank, buffer: Buffer, local: str, kind: Kind | None) -> Lazy:
    name = buffer.names[local]
    own = kind or (Kind.main if Kind.main in made.kinds[name] else Kind.weight)
    return lazy.cast(made.tensor(name, own, rank), torch.float32)


def _write_bucket(
    writer: DcpWriter, key: str, length: int, parts: list[tuple[int, Lazy]], count: Callable[[int], None], piece: int
) -> None:
    writer.declare(key, (length,), torch.float32)
    end = 0
    for start, part in parts:
        _fill(writer, key, end, start)
        writer.copy(key, part, count, piece, flat_at=start)
        end = start + part.numel
    _fill(writer, key, end, length)


def _fill(writer: DcpWriter, key: str, start: int, stop: int) -> None:
    if stop > start:
        writer.write(key, torch.zeros(stop - start), (start,))
