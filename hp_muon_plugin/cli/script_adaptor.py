"""When a script's Megatron gets the plugin: at once, or below MindSpeed's patches, which must come first."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path

from hp_muon_plugin.cli.script_args import Request
from hp_muon_plugin.cli.script_module import find_module
from hp_muon_plugin.config.choices import PlatformName
from hp_muon_plugin.platform import mindspeed

_WORD = "mindspeed"


@contextlib.contextmanager
def registering(request: Request, platform: PlatformName, register: Callable[[], None]) -> Iterator[None]:
    """A block that runs the script, with the plugin registered as soon as that can be.

    Args:
        request: The command line.
        platform: The device that is used.
        register: Registers the plugin, once; it imports Megatron.

    Raises:
        ConfigError: If the script imports Megatron before MindSpeed.
    """
    is_installed = mindspeed.is_installed()
    brings_its_own = is_installed and _WORD in _text(request)
    if not is_installed or not (brings_its_own or platform is PlatformName.npu):
        register()
        yield
        return
    with mindspeed.once_patched(register):
        if not brings_its_own:
            importlib.import_module(mindspeed.ADAPTOR)
        yield


def _text(request: Request) -> str:
    """What the script says; of a module that is not a file, nothing."""
    assert request.script is not None
    path = Path(find_module(request.script).origin or "") if request.is_module else Path(request.script)
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
