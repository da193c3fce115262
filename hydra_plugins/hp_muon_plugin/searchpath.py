"""The search-path plugin, by import: Hydra skips a class that it has already seen."""

from hp_muon_plugin.config.searchpath import HpMuonSearchPath

__all__ = ["HpMuonSearchPath"]
