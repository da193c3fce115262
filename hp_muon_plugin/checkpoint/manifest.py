"""``manifest.json``: what our own checkpoints hold besides tensors, and what must be there to be whole.

It is written last, so that a folder without one is no checkpoint. Nothing in it is ever executed:
JSON, checked on reading, with a digest of its own.

Tensors of parameters are stored under ``str(Key)`` (``weight/decoder.final_layernorm.weight``); tensors
inside the run state under their place in it (``random/rank0/torch``).
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from hp_muon_plugin.checkpoint.canonical import Info, Key, Momentum, RunState
from hp_muon_plugin.checkpoint.folders import MANIFEST
from hp_muon_plugin.checkpoint.hashing import HASH
from hp_muon_plugin.checkpoint.plain import decode, encode, put_tensors, take_tensors
from hp_muon_plugin.errors import CheckpointError, DamageError

FORMAT = "hp_muon_plugin"
VERSION = 2
"""2: files have XXH3-128 instead of SHA-256, which is ten times as slow even where the processor helps."""

_DIGEST = "sha256"
_FIELDS = tuple(field.name for field in fields(RunState))
_TYPES: dict[str, tuple[type, ...]] = {
    "iteration": (int,),
    "consumed_samples": (int, type(None)),
    "flops": (int, float, type(None)),
    "vocab_size": (int, type(None)),
    "momentum": (str, type(None)),
}
_HASHES: dict[str, tuple[Callable[[], Any], re.Pattern[str]]] = {
    "xxh3_128": (HASH, re.compile(r"[0-9a-f]{32}")),
    "sha256": (hashlib.sha256, re.compile(r"[0-9a-f]{64}")),
}
_BLOCK_BYTES = 2**20
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file of a checkpoint.

    Attributes:
        nbytes: Its size.
        digest: Hash of its bytes, hexadecimal.
        algorithm: Of the hash: ``xxh3_128``, or ``sha256`` in manifests of version 1.
    """

    nbytes: int
    digest: str
    algorithm: str = "xxh3_128"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint is.

    Attributes:
        state: The run state; a :class:`~hp_muon_plugin.checkpoint.plain.TensorRef` stands for each tensor in it.
        tensors: Of all stored tensors by name, those of the run state too.
        files: All files but the manifest, by name.
    """

    state: RunState
    tensors: Mapping[str, Info]
    files: Mapping[str, FileInfo]

    def parameters(self) -> dict[Key, Info]:
        """Tensors of parameters and buffers, in stored order."""
        split = (name.split("/", 1) for name in self.tensors)
        return {Key(name, kind): self.tensors[f"{kind}/{name}"] for kind, name in split if kind not in _FIELDS}


def without_tensors(state: RunState) -> tuple[RunState, dict[str, torch.Tensor]]:
    """Take the tensors out of a run state, to be stored beside the others.

    Args:
        state: A run state.

    Returns:
        A copy with references, and the tensors by the name of their place, as ``random/rank0/torch``.
    """
    tensors: dict[str, torch.Tensor] = {}
    return RunState(**{name: take_tensors(getattr(state, name), name, tensors) for name in _FIELDS}), tensors


def with_tensors(state: RunState, read: Callable[[str], torch.Tensor]) -> RunState:
    """Put tensors back into a run state.

    Args:
        state: With references.
        read: Gives the stored tensor of a name.

    Returns:
        A copy with tensors.
    """
    return RunState(**{name: put_tensors(getattr(state, name), read) for name in _FIELDS})


def manifest_text(manifest: Manifest) -> str:
    """The text of ``manifest.json``.

    Args:
        manifest: What to write. Its run state holds no tensors.

    Returns:
        JSON.

    Raises:
        CheckpointError: If the run state holds what is no plain value.
    """
    state = {name: getattr(manifest.state, name) for name in _FIELDS}
    if manifest.state.momentum is not None:
        state["momentum"] = str(manifest.state.momentum)
    body = {
        "format": FORMAT,
        "version": VERSION,
        "state": {name: encode(value, name) for name, value in state.items()},
        "tensors": {
            name: {"shape": list(info.shape), "dtype": dtype_name(info.dtype)}
            for name, info in manifest.tensors.items()
        },
        "files": {
            name: {"bytes": info.nbytes, info.algorithm: info.digest} for name, info in sorted(manifest.files.items())
        },
    }
    return json.dumps({**body, _DIGEST: _digest(body)}, indent=1, allow_nan=False)


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint; no other file is opened.

    Args:
        folder: The checkpoint, as ``iter_0000010``.

    Returns:
        The manifest.

    Raises:
        CheckpointError: If it is missing, damaged, or of a newer version.
    """
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: has no {MANIFEST}, so it is no checkpoint of hp_muon_plugin or was never finished\n"
            "  fix: give another folder, or convert it with hp-muon ckpt convert"
        ) from None
    except UnicodeDecodeError as error:
        raise DamageError(f"{path}: is damaged ({error})") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    return parse_manifest(text, path)


def parse_manifest(text: str, path: Path) -> Manifest:
    """Check the text of a manifest.

    Args:
        text: JSON.
        path: Where it is from, for messages.

    Returns:
        The manifest.

    Raises:
        CheckpointError: If it is damaged, or of a newer version.
    """
    try:
        body = json.loads(text)
        if body["format"] != FORMAT:
            raise CheckpointError(f"{path}: is of format {body['format']!r:.50}, not {FORMAT}")
        version, digest = body["version"], body.pop(_DIGEST)
        if not isinstance(version, int) or version > VERSION:
            raise CheckpointError(
                f"{path}: has version {version!r:.20}, this program knows up to {VERSION}\n  fix: update hp_muon_plugin"
            )
        if digest != _digest(body):
            raise DamageError(f"{path}: is damaged: its content does not have the digest that it names")
        return _manifest(body, path)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamageError(f"{path}: is damaged ({type(error).__name__}: {error})") from error


def check_files(folder: Path, manifest: Manifest) -> None:
    """Check that every file is there with its size. Hashes are not computed.

    Args:
        folder: The checkpoint.
        manifest: Its manifest.

    Raises:
        CheckpointError: If a file is missing, shorter or longer, naming it.
    """
    for name, info in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise DamageError(f"{path}: is missing, and the checkpoint needs it ({error.strerror})") from error
        if size != info.nbytes:
            raise DamageError(f"{path}: has {size} bytes, {info.nbytes} were written; the checkpoint is damaged")


def hashed(path: Path, algorithm: str = "xxh3_128") -> FileInfo:
    """Size and hash of a file.

    Args:
        path: The file.
        algorithm: Of the hash.

    Returns:
        What a manifest holds of it.
    """
    found, nbytes, block = _HASHES[algorithm][0](), 0, memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            found.update(block[:count])
            nbytes += count
    return FileInfo(nbytes, found.hexdigest(), algorithm)


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as manifests name it, ``bfloat16``.

    Args:
        dtype: The dtype.

    Returns:
        Its name.
    """
    return str(dtype).removeprefix("torch.")


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _manifest(body: Mapping[str, Any], path: Path) -> Manifest:
    given = {name: decode(value, name) for name, value in body["state"].items()}
    unknown = set(given) - set(_FIELDS)
    if unknown:
        raise ValueError(f"state has an unknown entry {sorted(unknown)[0]}")
    for name, value in given.items():
        if not isinstance(value, _TYPES.get(name, (dict,))) or isinstance(value, bool):
            raise TypeError(f"state.{name} is a {type(value).__name__}")
    state = RunState(**given)
    if state.momentum is not None:
        state = replace(state, momentum=Momentum(state.momentum))
    return Manifest(
        state,
        {name: _info(name, entry) for name, entry in body["tensors"].items()},
        {name: _file(name, entry) for name, entry in body["files"].items()},
    )


def _info(name: str, entry: Mapping[str, Any]) -> Info:
    shape = tuple(entry["shape"])
    if "/" not in name or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"tensor {name!r:.200} has shape {shape}")
    return Info(shape, _DTYPES[entry["dtype"]])


def _file(name: str, entry: Mapping[str, Any]) -> FileInfo:
    if name in ("", ".", "..", MANIFEST) or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"file name {name!r:.200}")
    nbytes, algorithm = entry["bytes"], next((known for known in _HASHES if known in entry), "xxh3_128")
    digest = entry[algorithm]
    if type(nbytes) is not int or nbytes < 0 or not _HASHES[algorithm][1].fullmatch(digest):
        raise ValueError(f"file {name} has {nbytes!r:.30} bytes and digest {digest!r:.80}")
    return FileInfo(nbytes, digest, algorithm)
