"""Ways around the hooks: whoever takes one is told, and never trains with something else in silence."""

from collections.abc import Sequence
from typing import Any

from hp_muon_plugin.errors import HookError
from hp_muon_plugin.megatron.hooks import Hook, HookKind, aliases, resolve
from hp_muon_plugin.megatron.report import Report
from hp_muon_plugin.platform import mindspeed


def refuse_other_muon(hook: Hook, original: Any) -> None:
    """Refuse to stand on another Muon's replacement of the same function.

    Args:
        hook: The hook that is being installed.
        original: What stands at its target.

    Raises:
        HookError: If that is one.
    """
    module = getattr(original, "__module__", "") or ""
    name = getattr(original, "__qualname__", "") or ""
    if not module.startswith("megatron.") and "muon" in f"{module}.{name}".lower():
        raise HookError(
            f"hook {hook.name}: {hook.target} is already replaced by {module}.{name}, another Muon\n"
            "  fix: switch that one off (MindSpeed: leave --optimizer muon out)"
        )


def refuse_other_wrappers(hook: Hook) -> None:
    """Refuse to stand below another Muon that MindSpeed has put around the same function.

    Args:
        hook: The hook that is to be installed.

    Raises:
        HookError: If there is one, or upstream moved the target.
    """
    owner, name, _ = resolve(hook)
    record = mindspeed.record_around(owner, name)
    for wrapper in () if record is None else record.wrappers:
        refuse_other_muon(hook, wrapper)


def refuse_unsharded(report: Report, chunks: Sequence[Any]) -> None:
    """Refuse an optimizer for a model that was to be sharded and is not.

    Args:
        report: The installation.
        chunks: Model chunks as the optimizer's factory got them.

    Raises:
        HookError: If one of them is in another wrapper.
    """
    if report.data_parallel is None or all(hook.hook.kind is not HookKind.wrapper for hook in report.hooks):
        return
    from hp_muon_plugin.megatron.sharded_model import HpFsdpModel

    others = [type(chunk).__name__ for chunk in chunks if not isinstance(chunk, HpFsdpModel)]
    if others:
        raise HookError(
            f"the model was to be sharded, but the trainer wrapped it in {others[0]} by another way\n"
            "  fix: leave options such as --use-torch-fsdp2 or --use-megatron-fsdp out, and call install() before the "
            "trainer builds its model; a trainer with a wrapper of its own calls "
            "hp_muon_plugin.megatron.sharded_model.wrap_model_chunks"
        )


def refuse_stale_aliases(report: Report) -> None:
    """Refuse to go on while a loaded module holds Megatron's own factory by name.

    Args:
        report: The installation.

    Raises:
        HookError: Naming module and attribute.
    """
    for hook in report.hooks:
        if hook.hook.kind is not HookKind.factory:
            continue
        stale = [f"{module.__name__}.{name}" for module, name in aliases(hook.original)]
        if stale:
            raise HookError(
                f"{', '.join(stale)} still is Megatron's own {hook.hook.attribute}\n"
                "  fix: call hp_muon_plugin.megatron.install() after that assignment, or import the function later"
            )
