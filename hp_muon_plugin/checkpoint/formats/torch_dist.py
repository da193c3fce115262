"""Megatron's ``torch_dist`` format."""

from hp_muon_plugin.checkpoint.formats.torch_dist_read import open_source

__all__ = ["open_source"]
