"""Which rank of a legacy Megatron checkpoint gets what: stages, experts, tensor-parallel parts, padded vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hp_muon_plugin.checkpoint import lazy
from hp_muon_plugin.checkpoint.canonical import Key, Kind, Momentum, Source, Target
from hp_muon_plugin.checkpoint.formats import names
from hp_muon_plugin.checkpoint.formats.base import kinds_by_name, momentum_factor
from hp_muon_plugin.checkpoint.formats.spelling import spelling
from hp_muon_plugin.checkpoint.lazy import Lazy
from hp_muon_plugin.checkpoint.megatron_names import registration_order
from hp_muon_plugin.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank that has a folder."""

    tensor: int
    pipeline: int
    expert: int


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

    def ranks(self) -> list[Rank]:
        """All ranks that have a folder."""
        sizes = self.target
        return [Rank(t, p, e) for p in range(sizes.pp) for e in range(sizes.ep) for t in range(sizes.tp)]

    def members(self, rank: Rank) -> dict[str, str]:
        """Names on a rank, in its model's order, each with the canonical name that it stands for."""
        spell = spelling(self.source, self.target)
        found = {local: name for name in self.order if (local := self._local(name, rank, spell)) is not None}
        if self.tied and self.target.pp > 1 and rank.pipeline == self.target.pp - 1:
            found[names.OUTPUT] = names.EMBEDDING
        return {name: found[name] for name in sorted(found, key=registration_order)}

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
        return names.shared(whole, self.cut(name), rank.tensor, self.target.tp, name)

    def cut(self, name: str) -> names.Cut:
        """How tensor-parallel ranks share a parameter."""
        local = self.source.state().args.get("transformer_impl") != "transformer_engine"
        return names.cut_of(name, gated=name in self.gated, down_cut=local)

    def _local(self, name: str, rank: Rank, spell: Callable[[str], str]) -> str | None:
        """Name of a parameter on a rank; None if it is not there."""
        first, last = rank.pipeline == 0, rank.pipeline == self.target.pp - 1
        layer, expert = names.layer_index(name), names.expert_index(name)
        if layer is None and not (first if name.startswith("embedding.") else last):
            return None
        per_stage = max(1, self.num_layers // self.target.pp)
        if layer is not None and layer // per_stage != rank.pipeline:
            return None
        if expert is not None:
            per_rank = self.num_experts // self.target.ep
            if expert // per_rank != rank.expert:
                return None
            name = names.with_expert(name, expert % per_rank)
        name = spell(name)  # by its place in the whole model: layers with and without experts differ
        return name if layer is None else names.with_layer(name, layer % per_stage)


def plan(source: Source, target: Target) -> Plan:
    """Plan the division of a checkpoint.

    Args:
        source: What is divided.
        target: Its sizes.

    Raises:
        ConfigError: If layers, experts or a parameter do not divide, or a parameter's division is not known.
    """
    kinds = kinds_by_name(source)
    made = Plan(source, target, kinds, sorted(kinds, key=registration_order))
    state = source.state()
    for key, info in source.tensors().items():
        if key.kind in (Kind.weight, Kind.buffer):
            made.shapes[key.name] = info.shape
    made.tied = names.EMBEDDING in made.shapes and names.OUTPUT not in made.shapes
    made.num_layers = 1 + max((index for name in kinds if (index := names.layer_index(name)) is not None), default=-1)
    made.num_experts = 1 + max((index for name in kinds if (index := names.expert_index(name)) is not None), default=-1)
    made.gated = {name for name in made.shapes if names.FIRST.search(name) and names.is_gated(name, made.shapes)}
    _check_division(made)
    rows = padded_rows(state.args, state.vocab_size, target)
    for name in (names.EMBEDDING, names.OUTPUT):
        if rows is not None and name in made.shapes:
            made.shapes[name] = (rows, *made.shapes[name][1:])
        if name in made.shapes and made.shapes[name][0] % target.tp:
            _refuse_vocabulary(made.shapes[name][0], state.vocab_size, target)
    for name, shape in made.shapes.items():
        if target.tp > 1 and made.cut(name) is names.Cut.unknown:
            raise ConfigError(
                "tp", target.tp, f"it is not known how tensor-parallel ranks share {name} {shape}", "write tp=1"
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
    for option, size, what, count in (
        ("pp", sizes.pp, "layers", made.num_layers),
        ("ep", sizes.ep, "experts", made.num_experts),
    ):
        if size < 1 or (size > 1 and (count == 0 or count % size)):
            raise ConfigError(
                option, size, f"the model has {count} {what}, which do not divide", f"choose a divisor of {count or 1}"
            )
    if sizes.pp > 1 and any(name.startswith("mtp.") for name in made.kinds):
        raise ConfigError(
            "pp",
            sizes.pp,
            "the model has multi-token prediction, whose stage would need its own embedding",
            "write pp=1",
        )
    args = made.source.state().args
    groups = args.get("num_query_groups") if args.get("group_query_attention") else args.get("num_attention_heads")
    if isinstance(groups, int) and groups % sizes.tp:
        raise ConfigError(
            "tp", sizes.tp, f"the model has {groups} query groups, which do not divide", f"choose a divisor of {groups}"
        )
