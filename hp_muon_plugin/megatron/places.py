"""Where a parameter stands in a Megatron model: its name and the modules above it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Place:
    """One parameter and where it stands.

    Attributes:
        name: Name inside the chunk, with wrapper prefixes.
        param: The parameter.
        owners: Modules from the outermost to the one that owns it.
    """

    name: str
    param: torch.nn.Parameter
    owners: tuple[torch.nn.Module, ...]

    @property
    def config(self) -> Any:
        """The TransformerConfig of the nearest module that has one."""
        for owner in reversed(self.owners):
            config = getattr(owner, "config", None)
            if config is not None and hasattr(config, "hidden_size"):
                return config
        raise AssertionError(f"{self.name}: no module above it has a TransformerConfig")

    @property
    def num_local_experts(self) -> int:
        """Routed experts that this rank holds in the parameter's layer."""
        for owner in reversed(self.owners):
            count = getattr(owner, "num_local_experts", None)
            if isinstance(count, int):
                return count
        raise AssertionError(f"{self.name}: no module above it says how many local experts it has")


def places(chunk: torch.nn.Module) -> Iterator[Place]:
    """All parameters of a model chunk; one that several modules share comes once for each.

    Args:
        chunk: A model chunk, wrapped or not.

    Yields:
        Places in module order.
    """
    modules = dict(chunk.named_modules(remove_duplicate=False))
    for module_name, module in modules.items():
        pieces = module_name.split(".") if module_name else []
        owners = tuple(modules[".".join(pieces[:depth])] for depth in range(len(pieces) + 1))
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            yield Place(".".join([*pieces, name]), param, owners)
