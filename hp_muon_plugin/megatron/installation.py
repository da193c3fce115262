"""Installing the plugin into Megatron: explicit, idempotent, reversible, and it reports."""

import atexit
import functools
import inspect
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from hp_muon_plugin.config.data_parallel import HpFsdp
from hp_muon_plugin.config.dp_checks import lone_errors
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.options import from_options, plain
from hp_muon_plugin.config.ranges import check_ranges
from hp_muon_plugin.errors import ConfigError, HookError, raise_all
from hp_muon_plugin.megatron.bypass import (
    refuse_other_muon,
    refuse_other_wrappers,
    refuse_stale_aliases,
    refuse_unsharded,
)
from hp_muon_plugin.megatron.contract import check_contract
from hp_muon_plugin.megatron.first_step import noting_init
from hp_muon_plugin.megatron.hooks import HOOKS, Hook, HookKind, put, take_back
from hp_muon_plugin.megatron.options import Given
from hp_muon_plugin.megatron.report import Report, Select
from hp_muon_plugin.megatron.versions import CoreVersion, check_tested, core_version

__all__ = ["Report", "Select", "install", "installed", "uninstall"]

logger = logging.getLogger(__name__)

_report: Report | None = None


def install(
    settings: Given = None,
    *,
    select: Select | str = Select.by_name,
    data_parallel: HpFsdp | Mapping[str, Any] | None = None,
    hooks: Sequence[str] | None = None,
    strict: bool = True,
    allow_untested: bool = False,
) -> Report:
    """Register ``hp_muon`` with the installed megatron-core.

    Calling it again with the same arguments changes nothing and returns the same report. Without
    ``optimizer='hp_muon'`` (or ``select='always'``) Megatron behaves as if it had not been called.

    Args:
        settings: A mapping of some options of :class:`~hp_muon_plugin.config.optimizer.HpMuon`: what
            it does not name comes from Megatron's configuration, as everything does with None. An
            ``HpMuon`` says everything.
        select: ``by_name`` or ``always``.
        data_parallel: Options of :class:`~hp_muon_plugin.config.data_parallel.HpFsdp`: whatever the trainer
            wraps in DistributedDataParallel is sharded, and updated by ours for ``adam`` and ``hp_muon``.
            None leaves Megatron's wrapper alone.
        hooks: Names of the hooks to install; None takes ``HP_MUON_HOOKS`` (comma-separated) from
            the environment, or all that this version needs.
        strict: Raise where a hook cannot be installed, or where in the first step of the plugin's optimizer something
            is trained that no optimizer updates; False logs it and goes on.
        allow_untested: Go on with a megatron-core version that is not tested.

    Returns:
        What was done.

    Raises:
        HookError: If the version is not tested, upstream moved a target, another Muon is already
            installed, or ``install`` was called before with other arguments.
        ConfigError: If an option is wrong.
    """
    global _report
    if select not in list(Select):
        raise ConfigError("select", select, "there is no such way to select", f"choose among {', '.join(Select)}")
    select, given, wrapper = Select(select), _typed(settings), _typed_wrapper(data_parallel)
    if _report is not None:
        if (_report.given, _report.select, _report.data_parallel) == (given, select, wrapper):
            return _report
        raise HookError("install() was called before with other arguments\n  fix: call uninstall() first")
    version = core_version()
    check_tested(version, allow_untested=allow_untested)
    wanted = _wanted(version, hooks)
    _check_enough(wanted, select)
    check_contract()
    _report = _put_all(Report(version, select, given, wrapper, strict=strict), wanted, strict=strict)
    if select is Select.always:
        atexit.register(_warn_unused, _report)
    logger.info("%s", _report)
    return _report


def _typed(settings: Given) -> Given:
    """Names and types are checked now; what else must hold depends on Megatron's configuration."""
    if settings is None or isinstance(settings, HpMuon):
        return settings
    from_options(HpMuon, settings, prefix="optimizer")
    return plain(settings)


def _typed_wrapper(options: HpFsdp | Mapping[str, Any] | None) -> HpFsdp | None:
    if options is None:
        return None
    typed = options if isinstance(options, HpFsdp) else from_options(HpFsdp, options, prefix="data_parallel")
    raise_all([*check_ranges(typed, "data_parallel"), *lone_errors(typed, "data_parallel")])
    return typed


def _put_all(report: Report, hooks: Sequence[Hook], *, strict: bool) -> Report:
    try:
        for hook in hooks:
            _put(hook, report, strict)
    except HookError:
        _take_back(report)
        raise
    return report


def uninstall() -> None:
    """Give Megatron's own functions back, identity for identity. Calling it again changes nothing.

    Raises:
        HookError: If somebody else has replaced a hooked function since.
    """
    global _report
    if _report is None:
        return
    _take_back(_report)
    atexit.unregister(_warn_unused)
    _report = None


def warn_no_more() -> None:
    """Say nothing when the program ends: whoever installed the plugin tells by itself whether it was used."""
    atexit.unregister(_warn_unused)


def installed() -> Report | None:
    """The report of the installation, or None."""
    return _report


def _wanted(version: CoreVersion, names: Sequence[str] | None) -> list[Hook]:
    given = "hooks"
    if names is None and os.environ.get("HP_MUON_HOOKS"):
        given, names = "HP_MUON_HOOKS", [name.strip() for name in os.environ["HP_MUON_HOOKS"].split(",")]
    known = [hook.name for hook in HOOKS]
    unknown = [name for name in names or [] if name not in known]
    if unknown:
        raise HookError(f"{given}={','.join(unknown)}: no such hook\n  fix: choose among {', '.join(known)}")
    return [hook for hook in HOOKS if hook.applies(version) and (names is None or hook.name in names)]


def _check_enough(hooks: Sequence[Hook], select: Select) -> None:
    """Only a factory hook can build ours for another optimizer's name."""
    if select is Select.always and all(hook.kind is not HookKind.factory for hook in hooks):
        names = ", ".join(hook.name for hook in hooks)
        raise HookError(
            f"hp_muon is to take the place of every optimizer, and none of the hooks {names} does that\n"
            "  fix: add the hook 'optimizer' (hooks=..., HP_MUON_HOOKS), or leave them out"
        )


def _put(hook: Hook, report: Report, strict: bool) -> None:
    make = {
        HookKind.entry: _entry,
        HookKind.factory: _factory,
        HookKind.guard: _guard,
        HookKind.wrapper: _wrapper,
    }
    try:
        if hook.kind is HookKind.factory:
            refuse_other_wrappers(hook)
        installed_hook = put(hook, functools.partial(make[hook.kind], hook, report))
    except HookError as error:
        if strict:
            raise
        logger.warning("%s", error)
        return
    report.hooks.append(installed_hook)


def _take_back(report: Report) -> None:
    while report.hooks:
        take_back(report.hooks[-1])
        report.hooks.pop()


def _factory(hook: Hook, report: Report, original: Any) -> Any:
    """A factory that builds the plugin's optimizer where it is selected and calls through elsewhere."""
    refuse_other_muon(hook, original)

    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(*args, **kwargs).arguments
        rest = {name: value for name, value in bound.items() if name not in ("config", "model_chunks")}
        config, chunks = bound["config"], bound["model_chunks"]
        refuse_unsharded(report, chunks)
        built: Any = None
        if report.is_selected(config):
            refuse_stale_aliases(report)
            from hp_muon_plugin.megatron.build import build_megatron_optimizer

            built = build_megatron_optimizer(config, chunks, settings=report.given, arguments=rest)
        elif report.data_parallel is not None:
            built = _sharded(config, chunks, rest)
        report.note_built(built, chunks)
        return original(*args, **kwargs) if built is None else built

    return factory


def _entry(hook: Hook, report: Report, table: Any) -> Any:
    """What Megatron's own factory takes the plugin's optimizer from."""
    from hp_muon_plugin.megatron.registry import registry_entry

    return registry_entry(report)


def _sharded(config: Any, chunks: Sequence[Any], arguments: Mapping[str, Any]) -> Any:
    from hp_muon_plugin.megatron.wrapping import build_for_shards

    return build_for_shards(config, chunks, arguments)


def _wrapper(hook: Hook, report: Report, original: Any) -> Any:
    """A constructor that makes the wrapper one of ours where that is chosen, and remembers what it wrapped."""
    if report.data_parallel is None:
        return noting_init(original, report.trained.note_wrapped)
    from hp_muon_plugin.megatron.wrapping import sharding_init

    return sharding_init(noting_init(original, report.trained.note_wrapped), report.data_parallel, report.note_sharded)


def _guard(hook: Hook, report: Report, original: Any) -> Any:
    """An ``__init__`` that refuses any other optimizer for a configuration that selects the plugin."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(original).bind(self, *args, **kwargs).arguments
        is_expected = report.is_selected(bound["config"]) or report.num_wrapped > 0
        if is_expected and not any(_is_ours(made) for made in (self, bound["optimizer"])):
            what = (
                "hp_muon is selected" if report.is_selected(bound["config"]) else "the model is sharded by dp=hp_fsdp"
            )
            raise HookError(
                f"{what}, but {type(self).__module__}.{type(self).__name__} was about to be built "
                "instead: the trainer took a way around megatron.core.optimizer.get_megatron_optimizer\n"
                "  fix: call hp_muon_plugin.megatron.install() before the trainer imports the factory into a "
                "closure, a default argument or a table, or build with "
                "hp_muon_plugin.megatron.build.build_megatron_optimizer"
            )
        optimizer = bound["optimizer"]  # None on a pipeline stage that has nothing for it
        report.trained.note_updated(p for group in getattr(optimizer, "param_groups", ()) for p in group["params"])
        original(self, *args, **kwargs)

    return init


def _is_ours(optimizer: Any) -> bool:
    """Whether something is an optimizer of ours; Megatron's own classes may stand around one."""
    return type(optimizer).__module__.startswith("hp_muon_plugin.")


def _warn_unused(report: Report) -> None:
    if report.num_built == 0:
        logger.error("hp_muon was installed with select='always', but no optimizer was built through it")
