"""MindSpeed, whose patches make Megatron run on Ascend NPUs: its order is kept, and hooks are put below its patches.

Its adaptor must be imported before Megatron, reads the command line then, and keeps a record of each function
that it patches: what stood there, the wrappers around it, and what stands there now. ``repatch`` takes all wrappers off
and puts others on, around what it believes to be the original. A hook on top of the wrappers is lost by that; one
that is the record's original lasts. Written after MindSpeed's sources for megatron-core 0.12.1, and tested with a
package that does the same (tests/lane/mindspeed_like); not run with MindSpeed itself, which needs an NPU.
"""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any, Protocol

from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.platform import patching

ADAPTOR = "mindspeed.megatron_adaptor"
"""What a script imports first to train on NPUs."""
_ADAPTORS = (ADAPTOR, "mindspeed.megatron_adaptor_v2", "mindspeed_llm", "mindspeed_mm", "megatron_adaptor")
_MANAGER = "mindspeed.patch_utils"
_PATCHED = "megatron.core.optimizer"


class Record(Protocol):
    """What MindSpeed knows of one function that it patches.

    Attributes:
        orig_module: Module or class that holds the function.
        orig_func_name: Its name there.
        orig_func: What stood there before all patches.
        patch_func: What takes its place below the wrappers, or None.
        final_patch_func: What stands there now.
        wrappers: What is put around it, the innermost first.
        is_applied: Whether all that is so.
    """

    orig_module: Any
    orig_func_name: str | None
    orig_func: Any
    patch_func: Any
    final_patch_func: Any
    wrappers: list[Callable[..., Any]]
    is_applied: bool

    def apply_patch(self) -> None:
        """Put it there, and wherever modules hold it by its own name."""


def is_installed() -> bool:
    """Whether MindSpeed can be imported; a package of that name without its patches is none. Imports nothing."""
    with contextlib.suppress(ValueError):  # a stand-in without a spec
        spec = importlib.util.find_spec("mindspeed")
        places = [] if spec is None else list(spec.submodule_search_locations or ())
        return any((Path(place) / "patch_utils.py").is_file() for place in places)
    return False


def is_adapted() -> bool:
    """Whether MindSpeed's adaptor, or that of a package on top of it, has been imported."""
    return any(name in sys.modules for name in _ADAPTORS)


def is_dummy(package: str) -> bool:
    """Whether a package is one that MindSpeed made up, so that Megatron's imports of it succeed.

    Args:
        package: Such as ``transformer_engine``.

    Returns:
        False also for a package that is not imported.
    """
    return "mindspeed" in str(getattr(sys.modules.get(package), "__file__", None) or "")


def _records() -> list[Record]:
    manager = getattr(sys.modules.get(_MANAGER), "MindSpeedPatchesManager", None)
    return list(getattr(manager, "patches_info", {}).values())


def record_around(owner: Any, name: str) -> Record | None:
    """The record of a function that MindSpeed has wrapped.

    Args:
        owner: Module or class that holds the function.
        name: Its name there.

    Returns:
        None if MindSpeed has not touched it, or has put another one in its place, which it would not
        do again around ours.
    """
    for record in _records():
        if record.is_applied and record.orig_module is owner and record.orig_func_name == name:
            return record if record.wrappers and record.patch_func is None else None
    return None


def record_above(function: Any) -> Record | None:
    """The record that takes a function for the original.

    Args:
        function: The function.

    Returns:
        None if MindSpeed has put nothing around it.
    """
    return next((record for record in _records() if record.orig_func is function), None)


def exchange(record: Record, function: Any) -> None:
    """Put another function below MindSpeed's wrappers, wherever what they make is used.

    Args:
        record: Of what is wrapped.
        function: What takes the original's place.
    """
    record.orig_func = function
    if not record.is_applied:  # all patches are off; the next ones go around this
        return
    before = record.final_patch_func
    record.is_applied = False
    record.apply_patch()
    after = record.final_patch_func
    for other in [other for other in _records() if other.orig_func is before]:
        exchange(other, after)
    for module, name in patching.aliases(before, lambda module: module.split(".")[0] != "hp_muon_plugin"):
        setattr(module, name, after)


def underlie(owner: Any, name: str, original: Any, function: Any) -> None:
    """Have MindSpeed put its next patches around another function, where it has taken them off.

    Args:
        owner: Module or class that holds the function.
        name: Its name there.
        original: What MindSpeed believes to be the original.
        function: What stands there now.
    """
    for record in _records():
        is_off = not record.is_applied and record.orig_func is original
        if is_off and record.orig_module is owner and record.orig_func_name == name:
            record.orig_func = function


class _Order(MetaPathFinder):
    """Refuses to import Megatron before MindSpeed's adaptor: the stand-ins for what Megatron imports come too late."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "megatron.core" and not is_adapted():
            raise ConfigError(
                "SCRIPT",
                sys.argv[0],
                "imports Megatron before MindSpeed's adaptor, whose patches would come too late",
                f"import {ADAPTOR} (or mindspeed_llm) right after torch in it, or leave MindSpeed out of it altogether",
            )


@contextlib.contextmanager
def once_patched(then: Callable[[], None]) -> Iterator[None]:
    """A block in which something is done as soon as MindSpeed has patched Megatron.

    Args:
        then: Called once, after the first time that patches are applied with Megatron's optimizers imported; never, if
            that does not happen.

    Raises:
        ConfigError: If Megatron is imported in the block before MindSpeed's adaptor.
    """
    manager = importlib.import_module(_MANAGER).MindSpeedPatchesManager
    apply, order = vars(manager)["apply_patches"], _Order()

    def apply_patches() -> None:
        apply.__func__()
        if _PATCHED in sys.modules:
            end()
            then()

    def end() -> None:
        manager.apply_patches = apply
        if order in sys.meta_path:
            sys.meta_path.remove(order)

    manager.apply_patches = staticmethod(apply_patches)
    sys.meta_path.insert(0, order)
    try:
        yield
    finally:
        end()


def adapt(values: Mapping[str, Any]) -> None:
    """Import MindSpeed's adaptor for a trainer that has no command line in Megatron's style.

    The adaptor decides by Megatron's arguments what it patches. It finds them here, whatever ``sys.argv`` holds.

    Args:
        values: Megatron's arguments, by the names that its parser gives them.
    """
    before, sys.argv = sys.argv, sys.argv[:1]
    try:
        arguments = importlib.import_module("mindspeed.args_utils").get_mindspeed_args()
        for name, value in values.items():
            setattr(arguments, name, value)
        importlib.import_module(ADAPTOR)
    finally:
        sys.argv = before
