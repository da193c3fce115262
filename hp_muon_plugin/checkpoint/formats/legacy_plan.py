"""Which rank of a Megatron run has what: stages, experts, tensor-parallel parts, padded vocabulary, flat buffers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from hp_muon_plugin.checkpoint import lazy
from hp_muon_plugin.checkpoint.canonical import Key, Kind, Momentum, Source, Target
from hp_muon_plugin.checkpoint.formats import names
from hp_muon_plugin.checkpoint.formats.base import kinds_by_name, momentum_factor
from hp_muon_plugin.checkpoint.formats.flat_layout import Entry
from hp_muon_plugin.checkpoint.formats.spelling import spelling
from hp_muon_plugin.checkpoint.formats.stages import Chunk, Stages, division_of, stages
from hp_muon_plugin.checkpoint.lazy import Lazy
from hp_muon_plugin.checkpoint.megatron_names import registration_order
from hp_muon_plugin.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank that has a folder. For experts ``tensor`` counts the tensor ranks inside an expert."""

    tensor: int
    pipeline: int
    expert: int


@dataclass(frozen=True, slots=True)
class Buffer:
    """A flat buffer of a rank: parameters of one chunk and dtype.

    Attributes:
        chunk: The model chunk.
        dtype: Of its weights.
        entries: Its parameters in the model's order, under their names on the rank.
        names: Canonical name of each.
    """

    chunk: int
    dtype: torch.dtype
    entries: list[Entry]
    names: dict[str, str]


@dataclass(slots=True)
class Plan:
    """How a checkpoint is divided.

    Attributes:
        source: What is divided.
        target: Its sizes.
        kinds: Kinds of tensors of each canonical name.
        order: Canonical names in the model's order.
        shapes: Shapes of weights and buffers, after padding the vocabulary.
        gated: First layers that are [gate; up].
        num_layers: Layers of the decoder.
        num_experts: Routed experts.
        tied: Whether the output layer is the embedding.
        stages: Chunks of each pipeline rank.
        expert_tensors: Tensor-parallel ranks inside an expert.
    """

    source: Source
    target: Target
    kinds: dict[str, list[str]]
    order: list[str]
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    num_layers: int = 0
    num_experts: int = 0
    tied: bool = False
    stages: Stages = field(default_factory=list)
    expert_tensors: int = 1

    def ranks(self) -> list[Rank]:
        """All ranks that have a folder."""
        sizes = self.target
        return [Rank(t, p, e) for p in range(sizes.pp) for e in range(sizes.ep) for t in range(sizes.tp)]

    def members(self, rank: Rank) -> list[dict[str, str]]:
        """Of each chunk the names on a rank, in its model's order, each with the canonical name that it stands for."""
        spell = spelling(self.source, self.target)
        each = []
        for chunk in self.stages[rank.pipeline]:
            found = {local: name for name in self.order if (local := self._local(name, chunk, rank, spell)) is not None}
            if self.target.pp > 1 and chunk.predicts:
                found[names.EMBEDDING] = names.EMBEDDING
            if self.target.pp > 1 and chunk.ends and self.tied:
                found[names.OUTPUT] = names.EMBEDDING  # beside multi-token prediction an idle one
            each.append({name: found[name] for name in sorted(found, key=registration_order)})
        return each

    def buffers(self, rank: Rank, members: list[dict[str, str]], wanted: Callable[[str], bool]) -> list[Buffer]:
        """Flat buffers of DistributedOptimizer on a rank: chunk by chunk, in one by the dtype that comes first.

        Args:
            rank: The rank.
            members: Its parameters, from :meth:`members`.
            wanted: Whether a canonical name belongs to the optimizer.
        """
        shares = self.target.pp > 1 and (self.tied or any(chunk.predicts for row in self.stages for chunk in row))
        found: dict[tuple[int, torch.dtype], Buffer] = {}
        for number, chunk in enumerate(members):
            for local, name in chunk.items():
                if Kind.buffer in self.kinds[name] or not wanted(name):
                    continue
                weight = self.tensor(name, Kind.weight, rank)
                buffer = found.setdefault((number, weight.dtype), Buffer(number, weight.dtype, [], {}))
                idle = local == names.OUTPUT and names.EMBEDDING in chunk
                alone = shares and name == names.EMBEDDING and not idle
                buffer.entries.append((local, prod(weight.shape), alone))
                buffer.names[local] = name
        return list(found.values())

    def tensor(self, name: str, kind: str, rank: Rank) -> Lazy:
        """A rank's part of a tensor.

        Args:
            name: Canonical name.
            kind: Its kind.
            rank: The rank.

        Raises:
            CheckpointError: If it does not divide.
        """
        whole = lazy.canonical(self.source, Key(name, kind))
        if kind == Kind.momentum:
            whole = lazy.scaled(whole, momentum_factor(self.source, self.target, Momentum.average, name))
        if name in (names.EMBEDDING, names.OUTPUT) and whole.shape:
            whole = lazy.padded(whole, self.shapes[name][0])
        count = self.expert_tensors if names.is_expert(name) else self.target.tp
        return names.shared(whole, self.cut(name), rank.tensor % count, count, name)

    def cut(self, name: str) -> names.Cut:
        """How tensor-parallel ranks share a parameter."""
        local = self.source.state().args.get("transformer_impl") != "transformer_engine"
        return names.cut_of(name, gated=name in self.gated, down_cut=local)

    @property
    def has_idle_output(self) -> bool:
        """Whether the last of several stages has multi-token prediction, a tied output layer, and so an idle copy."""
        return self.target.pp > 1 and self.tied and any(chunk.predicts and chunk.ends for chunk in self.stages[-1])

    def _local(self, name: str, chunk: Chunk, rank: Rank, spell: Callable[[str], str]) -> str | None:
        """Name of a parameter in a chunk of a rank; None if it is not there."""
        layer, expert = names.layer_index(name), names.expert_index(name)
        if not _is_there(name, layer, chunk):
            return None
        if expert is not None:
            per_rank = self.num_experts // self.target.ep
            if expert // per_rank != rank.expert:
                return None
            name = names.with_expert(name, expert % per_rank)
        name = spell(name)  # by its place in the whole model: layers with and without experts differ
        return name if layer is None else names.with_layer(name, layer - chunk.layers.start)


def _is_there(name: str, layer: int | None, chunk: Chunk) -> bool:
    if layer is not None:
        return layer in chunk.layers
    if name.startswith("embedding."):
        return chunk.embeds
    if name.startswith("mtp."):
        return chunk.predicts
    return chunk.normalises if name.startswith("decoder.") else chunk.ends


def plan(source: Source, target: Target, *, expert_tensors: int | None = None, rows: bool = True) -> Plan:
    """Plan the division of a checkpoint.

    Args:
        source: What is divided.
        target: Its sizes.
        expert_tensors: Tensor-parallel ranks inside an expert; None for those of the rest.
        rows: Whether the vocabulary is padded anew.

    Raises:
        ConfigError: If layers, experts or a parameter do not divide, or a parameter's division is not known.
    """
    kinds = kinds_by_name(source)
    made = Plan(source, target, kinds, sorted(kinds, key=registration_order))
    made.expert_tensors = expert_tensors or target.tp
    state = source.state()
    for key, info in source.tensors().items():
        if key.kind in (Kind.weight, Kind.buffer):
            made.shapes[key.name] = info.shape
    made.tied = names.EMBEDDING in made.shapes and names.OUTPUT not in made.shapes
    made.num_layers = 1 + max((index for name in kinds if (index := names.layer_index(name)) is not None), default=-1)
    made.num_experts = 1 + max((index for name in kinds if (index := names.expert_index(name)) is not None), default=-1)
    made.gated = {name for name in made.shapes if names.FIRST.search(name) and names.is_gated(name, made.shapes)}
    _check_division(made)
    predicts = any(name.startswith("mtp.") for name in kinds)
    made.stages = stages(made.num_layers, target.pp, division_of(source, target), predicts=predicts)
    wanted = padded_rows(state.args, state.vocab_size, target) if rows else None
    for name in (names.EMBEDDING, names.OUTPUT):
        if wanted is not None and name in made.shapes:
            made.shapes[name] = (wanted, *made.shapes[name][1:])
        if name in made.shapes and made.shapes[name][0] % target.tp:
            _refuse_vocabulary(made.shapes[name][0], state.vocab_size, target)
    for name, shape in made.shapes.items():
        if target.tp > 1 and made.cut(name) is names.Cut.unknown:
            raise ConfigError(
                "--tp", target.tp, f"it is not known how tensor-parallel ranks share {name} {shape}", "--tp 1"
            )
    return made


def _refuse_vocabulary(rows: int, vocab_size: int | None, target: Target) -> None:
    size = "" if vocab_size is not None else f" --vocab-size {rows}"
    raise ConfigError(
        "--tp",
        target.tp,
        f"does not divide the {rows} rows of the vocabulary, and nothing says how Megatron pads them",
        f"choose another size, or say how, as --make-vocab-size-divisible-by of the training:{size} "
        "--option make_vocab_size_divisible_by=128 (Megatron's default)",
    )


def padded_rows(args: dict[str, Any], vocab_size: int | None, target: Target) -> int | None:
    """Rows of the embedding as Megatron will want them; None to keep them.

    Args:
        args: Megatron's arguments.
        vocab_size: True size of the vocabulary.
        target: For the tensor-parallel size; its option ``make_vocab_size_divisible_by`` overrules the arguments.
    """
    given = target.options.get("make_vocab_size_divisible_by", "")
    multiple = int(given) if given.isdigit() else args.get("make_vocab_size_divisible_by")
    if vocab_size is None or not isinstance(multiple, int) or multiple < 1:
        return None
    unit = multiple * target.tp
    return -(-vocab_size // unit) * unit


def _check_division(made: Plan) -> None:
    sizes = made.target
    if sizes.ep < 1 or (sizes.ep > 1 and (made.num_experts == 0 or made.num_experts % sizes.ep)):
        why = f"the model has {made.num_experts} experts, which do not divide"
        raise ConfigError("--ep", sizes.ep, why, f"choose a divisor of {made.num_experts or 1}")
    if sizes.pp < 1 or (sizes.pp > 1 and made.num_layers == 0):
        why = f"the model has {made.num_layers} layers, which do not divide"
        raise ConfigError("--pp", sizes.pp, why, f"choose a divisor of {made.num_layers or 1}")
    args = made.source.state().args
    groups = args.get("num_query_groups") if args.get("group_query_attention") else args.get("num_attention_heads")
    if isinstance(groups, int) and groups % sizes.tp:
        raise ConfigError(
            "--tp",
            sizes.tp,
            f"the model has {groups} query groups, which do not divide",
            f"choose a divisor of {groups}",
        )
