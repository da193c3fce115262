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
    for pieces, owners in _modules(chunk):
        for name, param in owners[-1].named_parameters(recurse=False, remove_duplicate=False):
            yield Place(".".join([*pieces, name]), param, owners)


def buffer_places(chunk: torch.nn.Module) -> Iterator[tuple[Place, torch.Tensor]]:
    """All persistent buffers of a model chunk.

    Args:
        chunk: A model chunk, wrapped or not.

    Yields:
        Places, whose parameter is the buffer, and the buffers.
    """
    for pieces, owners in _modules(chunk):
        temporary = owners[-1]._non_persistent_buffers_set
        for name, buffer in owners[-1].named_buffers(recurse=False):
            if name not in temporary:
                yield Place(".".join([*pieces, name]), buffer, owners), buffer  # type: ignore[arg-type]


def _modules(chunk: torch.nn.Module) -> Iterator[tuple[list[str], tuple[torch.nn.Module, ...]]]:
    """Pieces of every module's name, and the modules above it and itself."""
    modules = dict(chunk.named_modules(remove_duplicate=False))
    for module_name in modules:
        pieces = module_name.split(".") if module_name else []
        yield pieces, tuple(modules[".".join(pieces[:depth])] for depth in range(len(pieces) + 1))
