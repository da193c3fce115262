"""Parameters of which other ranks hold or update other parts, and where these and what belongs to them lie."""

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn

from hp_muon_plugin.fsdp.bucket import Bucket
from hp_muon_plugin.fsdp.stale import stepped_optimizers

_PART = "_hp_fsdp_part"
_MODULES: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
_SHAPES: "weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[int, ...]]]" = weakref.WeakKeyDictionary()


def mark_parts(buckets: Iterable[Bucket]) -> None:
    """Mark parameters of buckets.

    Args:
        buckets: Whose weights are divided.
    """
    for bucket in buckets:
        for parameter in bucket.parameters:
            setattr(parameter.sharded, _PART, True)
            _MODULES.update(module for module, _ in parameter.places)


def note_shapes(module: nn.Module, buckets: Iterable[Bucket]) -> None:
    """Learn the shapes of a unit's shards, by which copies of them are known again.

    Args:
        module: One of the unit's.
        buckets: Those that ranks shard.
    """
    names = {id(child): f"{name}." if name else "" for name, child in module.named_modules()}
    shards = {
        f"{names[id(holder)]}{attribute}": parameter
        for bucket in buckets
        for parameter in bucket.parameters
        for holder, attribute in parameter.places[:1]
        if id(holder) in names
    }
    if any(parameter.sharded.shape != parameter.shape for parameter in shards.values()):
        _SHAPES[module] = {name: tuple(parameter.sharded.shape) for name, parameter in shards.items()}


def is_part(parameter: object) -> bool:
    """Whether other ranks hold or update other parts of what this parameter is a shard of.

    Args:
        parameter: Of any model.
    """
    return hasattr(parameter, _PART) and hasattr(parameter, "hp_shard")  # the mark is copied to whole ones, too


def part_gradients() -> list[torch.Tensor]:
    """Gradients of all parts."""
    return [part.grad for part in _parts() if part.grad is not None]


def _parts() -> list[nn.Parameter]:
    return [p for module in _MODULES for p in module._parameters.values() if p is not None and is_part(p)]


@dataclass(frozen=True, slots=True)
class Places:
    """Where parts and their optimizers' states lie. Scalars are the same on all ranks, as counts of steps.

    Attributes:
        storages: Memory of parts and states that hold something.
        states: Identities of states, also of those that hold nothing.
    """

    storages: frozenset[tuple[torch.device, int]]
    states: frozenset[int]

    @classmethod
    def now(cls) -> "Places":
        """As it is now."""
        states = [
            value
            for optimizer in stepped_optimizers()
            for parameter, state in optimizer.state.items()
            if is_part(parameter)
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.dim()
        ]
        held = [_storage(value) for value in [*_parts(), *states]]
        return cls(frozenset(place for place in held if place[1]), frozenset(map(id, states)))

    def has(self, value: object) -> bool:
        """Whether a value is a part or a part's state, or a view of one.

        Args:
            value: Anything.
        """
        return _is_plain(value) and (id(value) in self.states or _storage(value) in self.storages)


def _is_plain(value: object) -> TypeGuard[torch.Tensor]:
    return type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided  # type: ignore[attr-defined]


def _storage(value: torch.Tensor) -> tuple[torch.device, int]:
    return value.device, value.untyped_storage().data_ptr()


def copied_part(values: Mapping[str, Any]) -> str | None:
    """A tensor that copies a part, as its name and shape tell, and those of the others of its unit.

    Args:
        values: Tensors and others by their names, dotted.

    Returns:
        Its name, or None.
    """
    shapes = {name: tuple(value.shape) for name, value in values.items() if _is_plain(value)}
    for parts in _SHAPES.values():
        first, *_ = parts
        for name in [name for name in shapes if name == first or name.endswith(f".{first}")]:
            prefix = name.removesuffix(first)
            if all(shapes.get(prefix + part) == shape for part, shape in parts.items()):
                return name
    return None
