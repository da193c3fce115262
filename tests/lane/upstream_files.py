"""What is compared and converted of what upstream_parallel.py holds and writes."""

from pathlib import Path
from typing import Any

import torch

from hp_muon_plugin.checkpoint import convert
from hp_muon_plugin.checkpoint.canonical import Target
from hp_muon_plugin.checkpoint.formats import open_checkpoint
from lane.upstream_mesh import Mesh


def unequal(folder: Path, forms: list[str]) -> list[str]:
    """Tensors and values that are not the same in all forms."""
    first, *others = (open_checkpoint(folder / form) for form in forms)
    found = []
    for other in others:
        found += [f"{other.path}: {key}" for key in first.tensors().keys() ^ other.tensors().keys()]
        found += [
            f"{other.path}: {key}"
            for key in first.tensors().keys() & other.tensors().keys()
            if not torch.equal(first.read(key), other.read(key))
        ]
        same = first.state().steps == other.state().steps and first.state().hyper == other.state().hyper
        found += [] if same else [f"{other.path}: steps or values of groups"]
    return found


def converted(source: Path, target: Path, mesh: Mesh, to: str, sharding: str | None) -> None:
    """Convert for a mesh; nothing but random states may be lost."""
    sizes = mesh.sizes
    of_ranks = sharding in ("distributed", "dp_reshardable")
    inside = {"expert_tensor_parallel_size": str(sizes.etp)} if of_ranks and sizes.etp != sizes.tp else {}
    wanted = Target(sizes.tp, sizes.pp, sizes.ep, sharding=sharding, options=inside)
    found = convert.plan(open_checkpoint(source), to, wanted)
    assert all("random state" in line for line in found.losses), found.losses
    convert.convert(found, target, drop=True)
    found.source.close()


def differing(one: list[Any], other: list[Any]) -> list[str]:
    """Where what ranks held differs: names of weights, ``state`` for each parameter's, ``group``."""
    found: list[str] = []
    for ours, theirs in zip(one, other, strict=True):
        if "embedding.word_embeddings.weight" in ours or any(name.startswith("decoder.") for name in ours):
            found += [name for name in ours if ours[name] != theirs[name]]
        elif ours != theirs:
            found.append("state" if "main" in ours else "group")
    return found
