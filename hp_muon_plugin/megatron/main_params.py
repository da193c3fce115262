"""What an optimizer updates: float32 masters, or the model's parameters themselves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_COPIED_ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce", "shared")


@dataclass(frozen=True, slots=True)
class ParamPair:
    """A parameter of the model and the one that the optimizer updates.

    Attributes:
        model: The model's parameter; its gradient is in ``main_grad``.
        main: Its float32 master, or the same object where the model computes in float32.
    """

    model: torch.nn.Parameter
    main: torch.nn.Parameter

    @property
    def is_copy(self) -> bool:
        """Whether the master is a tensor of its own."""
        return self.main is not self.model


def move(pairs: Sequence[ParamPair], state: Mapping[torch.nn.Parameter, dict[str, Any]], where: str | None) -> None:
    """Move masters and optimizer state, and nothing that the model computes with.

    A parameter that is its own master stays: it may be a part of a buffer that is gathered.

    Args:
        pairs: What the optimizer updates.
        state: Its state by master; step counts stay where they are.
        where: A device, or None for that of each model parameter.
    """
    for pair in pairs:
        device = pair.model.device if where is None else torch.device(where)
        if pair.is_copy:
            pair.main.data = pair.main.data.to(device)
        values = state.get(pair.main, {})
        values |= {name: value.to(device) for name, value in values.items() if name != "step"}


def main_param(model: torch.nn.Parameter) -> torch.nn.Parameter:
    """The parameter that an optimizer updates.

    Args:
        model: The model's parameter.

    Returns:
        A float32 master of a bf16 parameter, with Megatron's marks; a float32 parameter itself.
    """
    if model.dtype == torch.float32:
        return model
    main = torch.nn.Parameter(model.detach().clone().float())
    for name in _COPIED_ATTRIBUTES:
        if hasattr(model, name):
            setattr(main, name, getattr(model, name))
    return main
