"""The form in which every checkpoint format meets every other.

A reader presents a checkpoint as whole logical tensors under canonical names, read slice by slice, and
as a run state of plain values. A writer pulls from it what its format wants, in its own order.

Canonical names are the module names of megatron-core's GPT model with its local layer specification:
layers and experts carry their global index (``decoder.layers.3.mlp.experts.local_experts.17.linear_fc1.weight``),
nothing is stacked, a gated ``linear_fc1`` is ``[gate; up]`` along dimension 0 whatever the tensor parallelism,
``linear_qkv`` is Megatron's interleaving by query group, and matrices are ``(out, in)``. A weight that is tied
to another is not there. The vocabulary may be padded; :attr:`RunState.vocab_size` tells the true size if known.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import torch


class Kind(StrEnum):
    """What a tensor is to its parameter."""

    weight = "weight"
    """The weight that the forward pass uses, in the model's dtype."""
    main = "main"
    """The float32 master of a weight of lower precision. Not there for float32 models: the weight is it."""
    exp_avg = "exp_avg"
    exp_avg_sq = "exp_avg_sq"
    momentum = "momentum_buffer"
    buffer = "buffer"
    """A persistent buffer of the module, as the router's ``expert_bias``."""


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Which tensor.

    Attributes:
        name: Canonical name of the parameter or buffer.
        kind: A :class:`Kind`; another string for optimizer state that we know nothing of, of the parameter's shape.
    """

    name: str
    kind: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True)
class Info:
    """A logical tensor.

    Attributes:
        shape: Whole shape.
        dtype: As stored.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Momentum(StrEnum):
    """What ``momentum_buffer`` holds."""

    sum = "sum"
    """``m = beta m + g``, as torch.optim.SGD and Keller Jordan's Muon."""
    average = "average"
    """``m = beta m + (1 - beta) g``: ``1 - beta`` times the other one."""


@dataclass(slots=True)
class RunState:
    """All that is not a tensor of a parameter. Plain values: numbers, strings, lists, dicts.

    Attributes:
        iteration: Optimizer steps done.
        consumed_samples: Training samples seen, or None.
        scheduler: State of Megatron's ``OptimizerParamScheduler``; empty if there was none.
        hyper: Of each canonical parameter name its param-group values (``lr``, ``wd_mult``, ``betas``...).
        steps: Of each canonical name the optimizer's step count, if its state has one (Adam).
        momentum: Convention of the momentum buffers, or None if there are none or it is unknown.
        vocab_size: True size of the vocabulary, without padding, or None.
        args: Arguments of the run, as far as they are plain values (Megatron's ``args``).
        flops: Floating-point operations so far, or None.
        random: Random state of each rank, by a name of the rank such as ``"rank0"``: plain values and tensors.
        data: Position in the data, as our own trainer saves it.
        model: What is known of the model's shape: ``num_layers``, ``num_experts``, ``tied``...
        other: What only one format knows; kept for a way back, and listed as lost by other writers.
    """

    iteration: int = 0
    consumed_samples: int | None = None
    scheduler: dict[str, Any] = field(default_factory=dict)
    hyper: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    momentum: Momentum | None = None
    vocab_size: int | None = None
    args: dict[str, Any] = field(default_factory=dict)
    flops: float | None = None
    random: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    other: dict[str, Any] = field(default_factory=dict)


class Source(Protocol):
    """An opened checkpoint. Opening reads metadata only."""

    format: str
    """As ``--to`` names it."""
    path: Path

    def tensors(self) -> Mapping[Key, Info]:
        """All logical tensors, in a stable order."""
        ...

    def read(self, key: Key, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Read rows of a tensor.

        Args:
            key: Which.
            start: First index of dimension 0.
            stop: One past the last; None for all that follow. A 0-dim tensor is read whole.

        Returns:
            The rows on the CPU, contiguous, dtype as stored. The caller may keep them, and must not change them: a hash
            may be computed from them meanwhile.

        Raises:
            CheckpointError: If a file is missing, short or damaged, naming file and tensor.
        """
        ...

    def state(self) -> RunState:
        """The run state."""
        ...

    def close(self) -> None:
        """Close files."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """What a writer is asked for.

    Attributes:
        tp: Tensor-parallel size, for formats that are cut by it (``mp_rank_*``).
        pp: Pipeline size, likewise.
        ep: Expert-parallel size, likewise.
        sharding: Optimizer form of a Megatron format, as ``fully_reshardable``; None takes the writer's default.
        megatron: Version of megatron-core that will read it, as ``(0, 16)``; None takes what most of them read.
        dtype: Dtype of weights in formats that hold weights only; None keeps them.
        shard_bytes: Size at which a new file is begun.
        jobs: Threads that read and write.
        options: What only one format knows, by name, as text.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    sharding: str | None = None
    megatron: tuple[int, int] | None = None
    dtype: torch.dtype | None = None
    shard_bytes: int = 4 * 2**30
    jobs: int = 1
    options: Mapping[str, str] = field(default_factory=dict)


class Loss(str):
    """One readable line about what a format cannot hold; all that verification may pass over for it is named.

    Args:
        text: The line.
        kinds: Kinds of tensors that the output lacks.
        steps: Names of parameters whose step counts it lacks or changes.
        has_iteration: Whether it keeps the iteration.
    """

    kinds: frozenset[str]
    steps: frozenset[str]
    has_iteration: bool

    def __new__(
        cls, text: str, *, kinds: Collection[str] = (), steps: Collection[str] = (), has_iteration: bool = True
    ) -> "Loss":
        """A line."""
        made = super().__new__(cls, text)
        made.kinds, made.steps, made.has_iteration = frozenset(kinds), frozenset(steps), has_iteration
        return made


class Writer(Protocol):
    """Writes one format."""

    format: str

    def losses(self, source: Source, target: Target) -> list[Loss]:
        """What the format cannot hold of a source; nothing is written.

        Args:
            source: What would be written.
            target: How.

        Raises:
            ConfigError: If it cannot be written so at all.
        """
        ...

    def write(self, source: Source, folder: Path, target: Target, count: Callable[[int], None], budget: int) -> None:
        """Write all of it into an empty folder. The caller makes it atomic, and verifies.

        Args:
            source: What to write.
            folder: An empty folder.
            target: How.
            count: Called with the number of tensor bytes written, as they are.
            budget: Bytes of tensors to hold in memory at any time, about.
        """
        ...
