"""Megatron: versions, hooks, parameter specs, optimizer adapter.

``install()`` registers the plugin; nothing happens on import.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hp_muon_plugin.megatron.installation import install, uninstall

__all__ = ["install", "uninstall"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.installation"), name)
