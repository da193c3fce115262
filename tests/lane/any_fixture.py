"""Fixtures of every family, described so that the fixtures' model can be built for them."""

from pathlib import Path
from typing import Any

from hp_muon_plugin.checkpoint.canonical import Kind, Source
from hp_muon_plugin.errors import HookError
from hp_muon_plugin.megatron.versions import core_version
from tests.checkpoint import fixtures as megatron
from tests.checkpoint import others


def lane() -> str:
    """Family of the fixtures of the installed version; any where there is none, and nothing here runs."""
    try:
        return f"mcore0{core_version().minor}"
    except HookError:
        return "mcore016"


def folder_of(name: str, folder: Path) -> Path:
    """A fixture by ``family/name``; a copy if it is carried.

    Args:
        name: Of the fixture.
        folder: Where a carried one is unpacked.
    """
    packed = name.replace("/", "_")
    return megatron.unpacked(packed, folder) if packed in megatron.CARRIED else others.fixture(name, folder)


def described(source: Source, folder: Path) -> dict[str, Any]:
    """What the truth tells of a run, completed from the checkpoint where its family does not say.

    Args:
        source: The opened fixture.
        folder: Of the fixture.
    """
    kinds = {key.kind for key in source.tensors()}
    names = {key.name for key in source.tensors()}
    experts = any(".router." in name for name in names)
    told = {
        "tied": "output_layer.weight" not in names,
        **{"arch": "moe" if experts else "dense", "bf16": Kind.main in kinds, "ep": 1},
        **{"optimizer": "muon" if Kind.momentum in kinds else "adam", "layer_wise": False, "bucket_size": None},
        **{"distributed_optimizer": False, "format": source.format},
    }
    body = told | megatron.truth(folder)[1]
    return body | {"optimizer": told["optimizer"], "bf16": told["bf16"]}
