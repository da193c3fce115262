"""Muon: routing, planning, Newton-Schulz, and the optimizer itself.

Names are imported on first use, so that ``import hp_muon_plugin.muon`` stays free of torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hp_muon_plugin.muon.build import build_adamw, build_optimizer
    from hp_muon_plugin.muon.optimizer import HpMuonOptimizer
    from hp_muon_plugin.muon.table import routing_table

__all__ = ["HpMuonOptimizer", "build_adamw", "build_optimizer", "routing_table"]

_HOMES = {
    "HpMuonOptimizer": "optimizer",
    "build_adamw": "build",
    "build_optimizer": "build",
    "routing_table": "table",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
