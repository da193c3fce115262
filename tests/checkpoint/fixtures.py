"""Checkpoints that upstream code wrote, with hashes of whole tensors beside each: a few carried, all where shared."""

import hashlib
import json
import os
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from hp_muon_plugin.bench.made_up import MadeUp
from hp_muon_plugin.checkpoint.canonical import Info, Key, RunState, Source

DATA = Path(__file__).parent / "data"
_ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("HP_MUON_SHARED", _ROOT.parent / "shared")) / "fixtures" / "checkpoints"
CARRIED = tuple(sorted(path.name.removesuffix(".tar.xz") for path in DATA.glob("mcore0*.tar.xz")))
CORRUPT = "mcore019_dense_dp2_fr_mb"
_KINDS = {"param": "weight", "fp32_param": "main"}


def shared(pattern: str) -> list[str]:
    """Names of shared fixtures with a file that matches, carried ones left out; none where the folder is absent."""
    found = {"_".join(path.relative_to(SHARED).parts[:2]) for path in SHARED.glob(pattern)}
    return sorted(found - set(CARRIED))


def unpacked(name: str, folder: Path) -> Path:
    """A fixture: ``ckpt/`` and ``truth.json``; a copy if it is carried, so that tests may harm it."""
    if name in CARRIED:
        with tarfile.open(DATA / f"{name}.tar.xz") as archive:
            archive.extractall(folder / name, filter="data")
        return folder / name
    family = next(path.name for path in SHARED.iterdir() if path.is_dir() and name.startswith(f"{path.name}_"))
    return SHARED / family / name.removeprefix(f"{family}_")


def truth(fixture: Path) -> tuple[dict[Key, str], dict[str, Any]]:
    """SHA-256 of every tensor, and the rest of the truth."""
    body = json.loads((fixture / "truth.json").read_text())
    hashes = {}
    for name, item in body["tensors"].items():
        kind, _, tensor = name.partition("/")
        hashes[Key(tensor, _KINDS.get(kind, kind))] = item["sha256"]
    return hashes, body


def digest(tensor: torch.Tensor) -> str:
    """As the truth has it: of dtype, shape and bytes."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + data).hexdigest()


def made_up(mib: int, layers: int = 2) -> MadeUp:
    """Of about ``mib`` MiB: bfloat16 weights with masters and both moments, half of it one embedding."""
    rows = mib * 2**20 // 14 // 1024
    shapes = {"embedding.word_embeddings.weight": (rows // 2, 1024), "decoder.final_layernorm.weight": (1024,)}
    for layer in range(layers):
        shapes[f"decoder.layers.{layer}.mlp.linear_fc2.weight"] = (max(1, rows // 2 // layers), 1024)
    infos = {Key(name, "weight"): Info(shape, torch.bfloat16) for name, shape in shapes.items()}
    for kind in ("main", "exp_avg", "exp_avg_sq"):
        infos |= {Key(name, kind): Info(shape, torch.float32) for name, shape in shapes.items()}
    hyper = {name: {"lr": 0.01, "betas": (0.9, 0.95), "wd_mult": 1.0, "lr_mult": 1.0} for name in shapes}
    random = {"pp0.tp0": {"states": {"torch_rng_state": torch.arange(16, dtype=torch.uint8)}}}
    state = RunState(iteration=7, hyper=hyper, steps=dict.fromkeys(shapes, 7.0), random=random)
    return MadeUp(infos, state)


def differences(a: Source, b: Source) -> list[str]:
    """Tensors that are not the same bits in both, or only in one."""
    from hp_muon_plugin.checkpoint.verify import compared

    return [str(item) for item in compared(a, b, rtol=None, atol=None, count=lambda nbytes: None)]


def rewritten(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the bytes of a file."""
    path.write_bytes(change(path.read_bytes()))


def names(items: Iterable[Path]) -> list[str]:
    return sorted(item.name for item in items)
