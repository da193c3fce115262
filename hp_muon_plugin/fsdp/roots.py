"""Roots of sharded models: which units are in them, and what is chosen for all of them."""

import contextlib
from collections.abc import Iterator
from functools import partial

from torch import nn

from hp_muon_plugin.config.choices import OuterMode
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.fsdp.policy import ScheduleOptions
from hp_muon_plugin.fsdp.schedule import Schedule
from hp_muon_plugin.fsdp.stale import refuse_added
from hp_muon_plugin.fsdp.unit import Unit
from hp_muon_plugin.platform.wire import Wire

_UNIT = "_hp_fsdp_unit"
_SCHEDULE = "_hp_fsdp_schedule"
_MAKE_SCHEDULE = "_hp_fsdp_make_schedule"


def join_unit(unit: Unit, ahead: ScheduleOptions, mode: OuterMode, wire: Wire) -> None:
    """Let modules be known as a unit, and as a root if none that contains them becomes one.

    Args:
        unit: Whose modules.
        ahead: For a root.
        mode: For a root.
        wire: Collectives.
    """
    for module in unit.modules:
        setattr(module, _UNIT, unit)
        setattr(module, _MAKE_SCHEDULE, partial(_new_schedule, unit, ahead, mode, wire))


def is_unit(module: nn.Module) -> bool:
    """Whether :func:`hp_fully_shard` was called on a module."""
    return getattr(module, _UNIT, None) is not None


def units_of(module: nn.Module) -> list[Unit]:
    """The units in a module, itself included, in the order of ``module.modules()``.

    Args:
        module: Any module.

    Returns:
        The units.
    """
    found = (getattr(child, _UNIT, None) for child in module.modules())
    return list(dict.fromkeys(unit for unit in found if unit is not None))  # torch.compile's wrapper shows it twice


def _new_schedule(root: Unit, options: ScheduleOptions, mode: OuterMode, wire: Wire) -> Schedule:
    model, *others = root.modules
    if others:
        raise ConfigError(
            "module",
            root.name,
            "are several modules, and the model that contains them is not sharded",
            "call hp_fully_shard on the whole model, last",
        )
    names = {id(child): name for name, child in model.named_modules()}
    units = units_of(model)
    refuse_added(model)
    for unit in units:
        found = [names.get(id(module)) for module in unit.modules]
        if None in found:
            raise ConfigError(
                "module",
                unit.name,
                "are units together, and not all of them are in the model that runs",
                "group modules of one model, and run that model",
            )
        unit.rename([name or type(model).__name__ for name in found])
        unit.is_leaf = len(unit.modules) == 1 and not others_in(unit)
        if unit.options.reshard_after_forward is None:
            unit.reshards = unit is not root
        if any(hasattr(module, _SCHEDULE) for module in unit.modules):
            raise RuntimeError(
                f"{unit.name}: ran by itself before the model that contains it\n"
                "  fix: run the whole model first, or do not call hp_fully_shard on the outer module"
            )
    schedule = Schedule(units, options, mode, wire)
    for unit in units:
        for module in unit.modules:
            setattr(module, _SCHEDULE, schedule)
    return schedule


def others_in(unit: Unit) -> list[Unit]:
    """Units that lie inside one."""
    found = (other for module in unit.modules for other in units_of(module))
    return [other for other in dict.fromkeys(found) if other is not unit]


def schedule_of(module: nn.Module) -> Schedule:
    """The schedule of a model, made now if it has not run yet.

    Args:
        module: A root, or after the first forward any unit's module.

    Returns:
        The schedule.

    Raises:
        ConfigError: If the module is not sharded.
    """
    if not is_unit(module):
        raise ConfigError("module", type(module).__name__, "is not sharded", "call hp_fully_shard on it first")
    schedule: Schedule = getattr(module, _SCHEDULE, None) or getattr(module, _MAKE_SCHEDULE)()
    return schedule


def set_requires_gradient_sync(module: nn.Module, is_required: bool) -> None:
    """Choose whether backward reduces gradients. Without, they are accumulated whole on every rank.

    Args:
        module: A root.
        is_required: True for the last micro-batch of a step at least.
    """
    schedule_of(module).reducer.syncs = is_required


def set_requires_all_reduce(module: nn.Module, is_required: bool) -> None:
    """Choose whether backward sums over replicas. Without, it sums over the shard axis alone.

    Args:
        module: A root.
        is_required: True for the last micro-batch of a step at least.
    """
    schedule_of(module).reducer.all_reduces = is_required


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Accumulate gradients without any communication.

    Args:
        module: A root.
    """
    reducer = schedule_of(module).reducer
    before, reducer.syncs = reducer.syncs, False
    try:
        yield
    finally:
        reducer.syncs = before
