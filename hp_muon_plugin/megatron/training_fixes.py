"""What ``megatron.training`` needs to run from the megatron-core wheel, and on CPU.

Applied by ``python -m hp_muon_plugin.run`` before the script, and by nothing else.
"""

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

from hp_muon_plugin.megatron.local_fixes import Fix, apply_fixes
from hp_muon_plugin.platform import standin
from hp_muon_plugin.platform.patching import Patcher, Replacement

_wheel_patcher, _cpu_patcher = Patcher(), Patcher()


def apply_training_fixes() -> tuple[str, ...]:
    """Apply what the installed ``megatron.training`` needs here. Calling it again changes nothing.

    Returns:
        Names of the fixes; none where there is no ``megatron.training``.
    """
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.training") is None:
        return ()
    names = apply_fixes(_wheel_patcher, WHEEL_FIXES)
    return names + apply_fixes(_cpu_patcher, CPU_FIXES) if standin.is_active() else names


def remove_training_fixes() -> None:
    """Put Megatron's own code back."""
    _cpu_patcher.restore()
    _wheel_patcher.restore()


def _no_makefile() -> list[Replacement]:
    utils = importlib.import_module("megatron.core.datasets.utils")
    folder = Path(utils.__file__ or "").parent
    is_compiled = importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
    if not is_compiled or (folder / "Makefile").is_file():
        return []
    why = "the wheel brings the compiled helpers and no Makefile, and the compiler's failure ends the job"
    return [Replacement(utils, "compile_helpers", lambda original: lambda: None, why)]


def _no_cuda() -> list[Replacement]:
    initialize = importlib.import_module("megatron.training.initialize")
    importlib.import_module("megatron.training.training")  # holds the function by name
    return [
        Replacement(
            initialize,
            "initialize_megatron",
            lambda original: functools.wraps(original)(functools.partial(original, allow_no_cuda=True)),
            "asserts that there is a CUDA device",
        ),
        Replacement(torch.cuda, "device_count", _count_for_megatron, "without a device no process group is made"),
    ]


def _count_for_megatron(original: Any) -> Any:
    def device_count() -> int:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return 1 if caller.startswith("megatron.") else int(original())

    return device_count


WHEEL_FIXES: tuple[Fix, ...] = (Fix("compiled-helpers", (0, 12), (0, 19), _no_makefile),)
CPU_FIXES: tuple[Fix, ...] = (Fix("training-without-cuda", (0, 12), (0, 19), _no_cuda),)
