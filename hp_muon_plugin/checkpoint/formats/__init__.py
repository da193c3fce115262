"""The formats of checkpoints: which one a folder is, and the reader and writer of each."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from hp_muon_plugin.checkpoint.canonical import Source, Writer
from hp_muon_plugin.checkpoint.detect import Found, find
from hp_muon_plugin.errors import CheckpointError, ConfigError

_PACKAGE = "hp_muon_plugin.checkpoint.formats"


@dataclass(frozen=True, slots=True)
class Format:
    """A format.

    Attributes:
        name: As ``--to`` names it.
        what: One line for ``--help``.
        reader: ``module:function`` below this package, called with the folder of the iteration; None if not read.
        writer: ``module:Class`` below this package, made without arguments; None if not written.
        is_tracked: Whether checkpoints lie in ``iter_0000010`` beside a tracker file, as Megatron's.
    """

    name: str
    what: str
    reader: str | None
    writer: str | None
    is_tracked: bool = True


FORMATS = {
    entry.name: entry
    for entry in (
        Format("hp", "our own: torch DCP files with a manifest", "hp:open_source", "hp:HpWriter"),
        Format(
            "torch_dist",
            "Megatron DDP and DistributedOptimizer, every sharding type",
            "torch_dist:open_source",
            "torch_dist:TorchDistWriter",
        ),
        Format("torch", "Megatron's legacy mp_rank_* folders", "legacy:open_legacy", "legacy_write:LegacyWriter"),
        Format(
            "fsdp_dtensor",
            "Megatron-FSDP",
            "megatron_fsdp:open_fsdp_dtensor",
            "megatron_fsdp_write:MegatronFsdpWriter",
        ),
        Format(
            "fsdp2",
            "torch FSDP2 with DCP, by names",
            "fsdp2:open_fsdp2",
            "fsdp2_write:Fsdp2Writer",
            is_tracked=False,
        ),
        Format(
            "torch_dcp",
            "Megatron's own torch FSDP2, by numbers",
            "torch_dcp:open_torch_dcp",
            "torch_dcp_write:TorchDcpWriter",
        ),
        Format(
            "hyper_parallel",
            "HyperParallel's own",
            "hyper_parallel:open_hyper_parallel",
            "hyper_parallel_write:HyperParallelWriter",
            is_tracked=False,
        ),
        Format(
            "hf",
            "Hugging Face safetensors, weights only",
            "hf:open_hf",
            "hf_write:HfWriter",
            is_tracked=False,
        ),
    )
}


def open_checkpoint(path: Path, name: str | None = None) -> Source:
    """Open a checkpoint of any format.

    Args:
        path: Its folder, or the folder above with a tracker file that names the iteration.
        name: The format if it is known; None to detect it.

    Returns:
        The opened checkpoint; only metadata was read.

    Raises:
        CheckpointError: If there is none, of an unknown format, or damaged.
        ConfigError: If the named format is not read.
    """
    found = find(path)
    name = name or found.format
    reader = FORMATS[name].reader if name in FORMATS else None
    if reader is None:
        raise CheckpointError(f"{found.folder} is a checkpoint in the format {name}, which is not read")
    return cast(Callable[[Path], Source], _load(reader))(found.folder)


def writer(name: str) -> Writer:
    """The writer of a format.

    Args:
        name: As ``--to`` names it.

    Raises:
        ConfigError: If there is none.
    """
    if name not in FORMATS or FORMATS[name].writer is None:
        known = ", ".join(entry.name for entry in FORMATS.values() if entry.writer)
        raise ConfigError("--to", name, "no such format to write", f"one of {known}")
    return cast(Callable[[], Writer], _load(cast(str, FORMATS[name].writer)))()


def _load(place: str) -> object:
    module, name = place.split(":")
    return getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name)


__all__ = ["FORMATS", "Format", "Found", "find", "open_checkpoint", "writer"]
