"""Replacing attributes of other people's modules, as data, reversibly.

Every replacement in this project, the CPU stand-in and the Megatron hooks alike, goes through this
module, so that what is replaced can be listed and put back exactly.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

KNOW_NO_TORCH = frozenset({"numpy", "sympy", "networkx", "mpmath"}) | sys.stdlib_module_names
"""What torch stands on: it can hold nothing of torch, and has a third of all names of a process."""
_MISSING = object()


@dataclass(frozen=True, slots=True)
class Replacement:
    """One attribute to replace.

    Attributes:
        owner: Module or class.
        name: Attribute of it.
        make: Gets the original (None if there is none) and returns the replacement.
        why: What goes wrong without it.
    """

    owner: Any
    name: str
    make: Callable[[Any], Any]
    why: str

    @property
    def target(self) -> str:
        """Dotted name for reports."""
        owner = str(getattr(self.owner, "__qualname__", None) or getattr(self.owner, "__name__", self.owner))
        module = getattr(self.owner, "__module__", "")
        prefix = f"{module}." if module and not owner.startswith(module) else ""
        return f"{prefix}{owner}.{self.name}"


class Patcher:
    """Applies replacements and restores the originals in reverse order."""

    def __init__(self) -> None:
        self._applied: list[tuple[Replacement, Any, Any]] = []

    @property
    def applied(self) -> tuple[Replacement, ...]:
        """What is replaced now."""
        return tuple(replacement for replacement, *_ in self._applied)

    def apply(self, replacements: Sequence[Replacement], *, aliases_in: str | None = None) -> None:
        """Replace attributes.

        Args:
            replacements: In this order.
            aliases_in: Also replace what loaded modules of this package imported by name before.
        """
        for replacement in replacements:
            current = getattr(replacement.owner, replacement.name, None)
            made = replacement.make(current)
            self._set(replacement, made)
            if aliases_in is not None and callable(current):
                for module, name in aliases(current, lambda loaded: loaded.split(".")[0] == aliases_in):
                    self._set(Replacement(module, name, replacement.make, replacement.why), made)

    def _set(self, replacement: Replacement, value: Any) -> None:
        owner, name = replacement.owner, replacement.name
        self._applied.append((replacement, vars(owner).get(name, _MISSING), getattr(owner, name, _MISSING)))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Put every original back. Calling it again changes nothing."""
        while self._applied:
            replacement, original, seen = self._applied.pop()
            owner, name = replacement.owner, replacement.name
            if original is _MISSING:
                delattr(owner, name)
                if seen is not _MISSING and not hasattr(owner, name):  # it keeps its attributes in a place of its own
                    setattr(owner, name, seen)
            else:
                setattr(owner, name, original)


def aliases(target: Any, is_searched: Callable[[str], bool]) -> list[tuple[ModuleType, str]]:
    """Module attributes that are this very object.

    Looking at a value writes to its count of references, which copies its page in a forked rank: what can hold
    nothing of torch is left alone.

    Args:
        target: The object; of torch, or of what stands on it.
        is_searched: Says of a module's name whether to look into it.

    Returns:
        Pairs of loaded module and attribute name.
    """
    found = []
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] in KNOW_NO_TORCH or not is_searched(module_name):
            continue
        if not isinstance(module, ModuleType):
            continue
        held = vars(module).copy()
        if id(target) in map(id, held.values()):  # so few modules hold it that the names of all others cost too much
            found += [(module, name) for name, value in held.items() if value is target]
    return found
