"""The hooks, as data: what is replaced in Megatron, why, and when the hook can go.

A function is replaced where it is defined and wherever it was imported by name before, which a scan
of loaded modules finds by identity. A function imported afterwards is the hooked one already. A method
is replaced in its class alone: a module that holds one by name keeps it to call the original.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import ModuleType
from typing import Any

from hp_muon_plugin.errors import HookError
from hp_muon_plugin.megatron.versions import CoreVersion
from hp_muon_plugin.platform import mindspeed, patching

_NOT_SEARCHED = frozenset({"hp_muon_plugin", "torch"})
"""Packages whose modules are not scanned: ours, and the one below Megatron with half of all names of a process."""
OPTIMIZER = "hp_muon"
"""By which Megatron's configuration names our optimizer."""
ENTRY_CLASS = "EmergingOptimizerEntry"
"""What the values of Megatron's table of optimizers are."""


class HookKind(StrEnum):
    """What a hook does."""

    entry = "entry"
    factory = "factory"
    guard = "guard"
    wrapper = "wrapper"


@dataclass(frozen=True, slots=True)
class Hook:
    """One hook.

    Attributes:
        name: By which ``HP_MUON_HOOKS`` and reports know it.
        module: Module that defines the target.
        attribute: Dotted name inside the module.
        kind: What it does.
        parameters: Parameter names that the target must have, or the class of a table's entries.
        first: First lane that has the target.
        last: Last tested lane that has it.
        why: Why it is needed.
        remove_when: When it can go.
    """

    name: str
    module: str
    attribute: str
    kind: HookKind
    parameters: tuple[str, ...]
    first: tuple[int, int]
    last: tuple[int, int]
    why: str
    remove_when: str

    @property
    def target(self) -> str:
        """Dotted name of the target."""
        return f"{self.module}.{self.attribute}"

    def applies(self, version: CoreVersion) -> bool:
        """Whether a version has the target.

        Args:
            version: A megatron-core version.

        Returns:
            True from ``first`` to ``last``; a lane newer than all tested ones counts as the last.
        """
        newest = max(hook.last for hook in HOOKS)
        return self.first <= version.lane <= self.last or (self.last == newest and version.lane > newest)


HOOKS: tuple[Hook, ...] = (
    Hook(
        name="optimizer",
        module="megatron.core.optimizer",
        attribute="get_megatron_optimizer",
        kind=HookKind.factory,
        parameters=("config", "model_chunks"),
        first=(0, 12),
        last=(0, 19),
        why="Megatron's factory knows a fixed set of optimizers and has no way to register another before 0.18, "
        "and later only for 2-D weights under DDP",
        remove_when="megatron-core has a public registry that hands over the wrapped chunks",
    ),
    Hook(
        name="muon_factory",
        module="megatron.core.optimizer.muon",
        attribute="get_megatron_muon_optimizer",
        kind=HookKind.factory,
        parameters=("config", "model_chunks"),
        first=(0, 16),
        last=(0, 17),
        why="training.py of 0.16 and 0.17 sends every optimizer whose name contains 'muon' here",
        remove_when="0.16 is no longer supported",
    ),
    Hook(
        name="registry",
        module="megatron.core.optimizer.emerging_optimizers",
        attribute="_EMERGING_OPTIMIZERS",
        kind=HookKind.entry,
        parameters=("optimizer_cls", "init_state_fn", "config_to_kwargs", "default_param_overrides"),
        first=(0, 18),
        last=(0, 19),
        why="Megatron's own factory, where it is not hooked or a trainer kept it by value, finds hp_muon in its table: "
        "under DistributedDataParallel only, and with the package emerging-optimizers, as every entry",
        remove_when="the hook optimizer can go; it is a convenience",
    ),
    Hook(
        name="wrapper",
        module="megatron.core.distributed",
        attribute="DistributedDataParallel.__init__",
        kind=HookKind.wrapper,
        parameters=("config", "ddp_config", "module"),
        first=(0, 12),
        last=(0, 19),
        why="trainers choose among Megatron's own wrappers in closures, default arguments and private functions that "
        "differ between versions; all of them construct this class. Without dp=hp_fsdp it only notes what is wrapped",
        remove_when="megatron-core has a public way to name another wrapper",
    ),
    Hook(
        name="guard",
        module="megatron.core.optimizer.optimizer",
        attribute="MegatronOptimizer.__init__",
        kind=HookKind.guard,
        parameters=("optimizer", "config"),
        first=(0, 12),
        last=(0, 19),
        why="a trainer that reached another factory would train with AdamW and say nothing",
        remove_when="never; it only watches",
    ),
)


@dataclass(slots=True)
class Installed:
    """A hook that is in place.

    Attributes:
        hook: Which.
        original: What stood there.
        replacement: What stands there now.
        places: Where it was replaced, as (owner, attribute name).
        below: Names of MindSpeed's wrappers, below which it was put.
    """

    hook: Hook
    original: Any
    replacement: Any
    places: list[tuple[Any, str]] = field(default_factory=list)
    below: tuple[str, ...] = ()

    def names(self) -> list[str]:
        """Where it was replaced, as dotted names."""
        if self.hook.kind is HookKind.entry:
            return [f"{self.hook.target}[{name!r}]" for _, name in self.places]
        below = f" (below MindSpeed's {', '.join(self.below)})" if self.below else ""
        return [f"{getattr(owner, '__name__', owner)}.{name}{below}" for owner, name in self.places]


def resolve(hook: Hook) -> tuple[Any, str, Any]:
    """Find the target of a hook.

    Args:
        hook: The hook.

    Returns:
        Owner, attribute name, and the object there.

    Raises:
        HookError: If upstream moved it.
    """
    try:
        owner: Any = importlib.import_module(hook.module)
        *path, name = hook.attribute.split(".")
        for piece in path:
            owner = getattr(owner, piece)
        return owner, name, getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise HookError(
            f"hook {hook.name}: this megatron-core has no {hook.target} ({error})\n"
            "  fix: install a megatron-core version that `hp-muon doctor` lists as tested"
        ) from error


def check_signature(hook: Hook, function: Callable[..., Any]) -> None:
    """Refuse a target whose parameters are not the ones that the hook relies on.

    Args:
        hook: The hook.
        function: What stands at its target; for a table, its entries' class is looked at instead.

    Raises:
        HookError: Naming the missing parameters.
    """
    if hook.kind is HookKind.entry:
        *_, function = resolve(replace(hook, attribute=ENTRY_CLASS))
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    missing = [name for name in hook.parameters if name not in parameters]
    if missing:
        raise HookError(
            f"hook {hook.name}: {hook.target} has no parameter {', '.join(missing)} any more; it takes "
            f"({', '.join(parameters)})\n"
            "  fix: install a megatron-core version that `hp-muon doctor` lists as tested"
        )


def put(hook: Hook, make: Callable[[Any], Any]) -> Installed:
    """Replace the target of a hook and every alias of it, or add an entry to a table.

    Args:
        hook: The hook.
        make: Gets the original, returns the replacement.

    Returns:
        What was done.

    Raises:
        HookError: If upstream moved the target or changed its parameters.
    """
    owner, name, original = resolve(hook)
    record = mindspeed.record_around(owner, name)
    if record is not None:
        return _put_below(hook, record, make)
    check_signature(hook, original)
    if hook.kind is HookKind.entry:
        return _put_entry(hook, original, make(original))
    installed = Installed(hook, original, make(original))
    by_name = aliases(original) if isinstance(owner, ModuleType) else []
    for place in [(owner, name), *by_name]:
        if place not in installed.places:
            setattr(*place, installed.replacement)
            installed.places.append(place)
    mindspeed.underlie(owner, name, original, installed.replacement)
    return installed


def _put_below(hook: Hook, record: mindspeed.Record, make: Callable[[Any], Any]) -> Installed:
    """Under MindSpeed's wrappers, which it may take off and put on again."""
    original = record.orig_func
    check_signature(hook, original)
    names = tuple(getattr(wrapper, "__name__", "") for wrapper in record.wrappers)
    place = (record.orig_module, hook.attribute.rpartition(".")[2])
    installed = Installed(hook, original, make(original), [place], names)
    mindspeed.exchange(record, installed.replacement)
    return installed


def _put_entry(hook: Hook, table: dict[str, Any], entry: Any) -> Installed:
    if OPTIMIZER in table:
        raise HookError(
            f"hook {hook.name}: {hook.target}[{OPTIMIZER!r}] is there already, and not ours\n"
            "  fix: remove it, or leave this hook out by HP_MUON_HOOKS"
        )
    table[OPTIMIZER] = entry
    return Installed(hook, None, entry, [(table, OPTIMIZER)])


def take_back(installed: Installed) -> None:
    """Restore the original everywhere.

    Args:
        installed: From :func:`put`.

    Raises:
        HookError: If somebody has replaced our replacement since; then nothing is changed.
    """
    is_entry = installed.hook.kind is HookKind.entry
    record = mindspeed.record_above(installed.replacement)
    if record is not None:
        mindspeed.exchange(record, installed.original)
        installed.places = [
            place for place in installed.places if vars(place[0]).get(place[1]) is installed.replacement
        ]
    foreign = [
        shown
        for (owner, name), shown in zip(installed.places, installed.names(), strict=True)
        if (owner if is_entry else vars(owner)).get(name) is not installed.replacement
    ]
    if foreign:
        raise HookError(
            f"hook {installed.hook.name}: {', '.join(foreign)} was replaced again after install()\n"
            "  fix: uninstall whatever was installed later first"
        )
    for owner, name in installed.places:
        if is_entry:
            del owner[name]
        else:
            setattr(owner, name, installed.original)


def aliases(function: Any) -> list[tuple[ModuleType, str]]:
    """Module attributes that are this very function, in all loaded modules but ours and those that Megatron stands on.

    Args:
        function: The function.

    Returns:
        Pairs of module and attribute name.
    """
    return patching.aliases(function, lambda name: name.partition(".")[0] not in _NOT_SEARCHED)
