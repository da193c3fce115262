"""One parameter of a unit: its shard, which the optimizer sees, and its gathered weight."""

from dataclasses import dataclass

import torch
from torch import nn

from hp_muon_plugin.layout.bucket import Placement


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """Which part of a parameter a shard is. Every shard carries it as ``hp_shard``.

    Attributes:
        name: Name in the unit's module.
        shape: Shape of the whole parameter.
        start: First element that this rank holds, in the parameter's own order.
        stop: One past the last.
    """

    name: str
    shape: torch.Size
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Original:
    """A parameter before it is sharded.

    Attributes:
        name: Name in the unit's module.
        parameter: The whole parameter.
        places: ``(module, attribute)``; several for tied parameters.
    """

    name: str
    parameter: nn.Parameter
    places: list[tuple[nn.Module, str]]


class Parameter:
    """A parameter in its two forms. Exactly one of them is registered on the modules at any time.

    Attributes:
        name: Name in the unit's module.
        placement: Where the parameter lies in its bucket.
        places: ``(module, attribute)``; several for tied parameters.
        sharded: This rank's range: ``(rows, ...)`` where it holds whole rows, else one-dimensional; may be
            empty. A view of the bucket's shard.
        full: The gathered weight, a plain leaf in the compute type. Its memory belongs to the schedule.
    """

    def __init__(
        self,
        name: str,
        original: nn.Parameter,
        places: list[tuple[nn.Module, str]],
        placement: Placement,
        *,
        compute_dtype: torch.dtype,
    ) -> None:
        self.name = name
        self.placement = placement
        self.places = places
        self.shape = original.shape
        self.sharded = original  # replaced by shard()
        self.full = nn.Parameter(
            torch.empty(0, dtype=compute_dtype, device=original.device), requires_grad=original.requires_grad
        )

    def shard(self, flat: torch.Tensor, start: int, stop: int, original: nn.Parameter) -> None:
        """Make this rank's range a parameter of its own.

        Args:
            flat: ``(stop - start,)``, the range in the bucket's shard.
            start: First element of the range.
            stop: One past the last.
            original: The whole parameter, whose attributes carry over.
        """
        row = self.shape[1:].numel() if len(self.shape) > 1 else 1
        is_rows = row > 0 and start % row == 0 and stop % row == 0
        local = flat.view(-1, *self.shape[1:]) if is_rows and len(self.shape) > 1 else flat
        self.sharded = nn.Parameter(local, requires_grad=original.requires_grad)
        marks = {key: value for key, value in vars(original).items() if key != "hp_shard"}  # Megatron's and others'
        vars(self.sharded).update(marks)
        vars(self.full).update(marks)
        self.sharded.hp_shard = ShardInfo(self.name, self.shape, start, stop)  # type: ignore[attr-defined]

    def bind(self, flat: torch.Tensor) -> None:
        """Let the gathered weight lie in a bucket's gather buffer.

        Args:
            flat: ``(num_shards * shard_numel,)``.
        """
        self.full.data = self.view_of(flat)

    def view_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Where the parameter lies whole in a buffer.

        Args:
            flat: ``(num_shards * shard_numel,)``.
        """
        start = self.placement.offset
        return flat[start : start + self.placement.numel].view(self.shape)

    def register(self, parameter: nn.Parameter) -> None:
        """Put one form on the modules.

        Args:
            parameter: :attr:`sharded` or :attr:`full`.
        """
        for module, attribute in self.places:
            module._parameters[attribute] = parameter
