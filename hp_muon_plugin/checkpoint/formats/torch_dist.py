"""Megatron's ``torch_dist`` format."""

from hp_muon_plugin.checkpoint.formats.torch_dist_read import open_source
from hp_muon_plugin.checkpoint.formats.torch_dist_write import TorchDistWriter

__all__ = ["TorchDistWriter", "open_source"]
