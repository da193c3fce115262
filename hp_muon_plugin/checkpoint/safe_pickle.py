"""Pickles of checkpoints read without running code from them.

Only globals of an exact list are known. Values that code would be needed for (megatron-core's and HyperParallel's
classes, torch's own metadata classes) become :class:`StandIn`; tensors become :class:`Stored`, which says where
their bytes lie. Everything else is refused by name.
"""

import argparse
import collections
import io
import pickle
from typing import Any

import torch

from hp_muon_plugin.checkpoint.pickle_values import (
    DTYPES,
    STORAGES,
    Array,
    Dtype,
    Marker,
    StandIn,
    Storage,
    Stored,
    array,
    element,
    latin,
    parameter,
    scalar,
    settled_array,
    signal_number,
    tensor,
    typed_tensor,
)
from hp_muon_plugin.errors import CheckpointError, DamageError

__all__ = ["StandIn", "Stored", "load_metadata", "load_values"]


def _stand_ins(module: str, names: str) -> dict[tuple[str, str], Any]:
    return {(module, name): type(name, (StandIn,), {"class_name": f"{module}.{name}"}) for name in names.split()}


_DCP = "torch.distributed.checkpoint"
_METADATA_NAMES = (
    "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
    "TensorStorageMetadata _MEM_FORMAT_ENCODING"
)
_NUMPY = {
    (f"{core}.multiarray", name): value
    for core in ("numpy.core", "numpy._core")
    for name, value in (("_reconstruct", array), ("scalar", scalar))
}
_COMMON: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): str,
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
}
_METADATA: dict[tuple[str, str], Any] = {
    **_COMMON,
    **{("pathlib", name): (lambda *parts: "/".join(parts)) for name in ("PosixPath", "PurePosixPath", "Path")},
    **_stand_ins(f"{_DCP}.metadata", _METADATA_NAMES),
    **_stand_ins(f"{_DCP}.filesystem", "_StorageInfo"),
    **_stand_ins(f"{_DCP}.planner", "SavePlan TensorWriteData WriteItem WriteItemType"),
    **_stand_ins("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
    **_stand_ins("hyper_parallel.core.checkpoint.metadata", _METADATA_NAMES),
    **_stand_ins("hyper_parallel.core.checkpoint.storage", "StorageInfo"),
}
_VALUES: dict[tuple[str, str], Any] = {
    **_COMMON,
    **_NUMPY,
    **{("torch", name): dtype for name, dtype in STORAGES.items()},
    ("torch.storage", "UntypedStorage"): torch.uint8,
    ("torch._utils", "_rebuild_tensor_v2"): tensor,
    ("torch._utils", "_rebuild_parameter"): parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): typed_tensor,
    # torch_npu writes the plain layout and casts to the device's own on load: the last argument may be ignored.
    ("torch_npu.utils.storage", "_rebuild_npu_tensor"): tensor,
    ("torch", "Tensor"): Marker,
    ("torch.nn.parameter", "Parameter"): Marker,
    ("numpy", "ndarray"): Marker,
    ("numpy", "dtype"): Dtype,
    ("argparse", "Namespace"): argparse.Namespace,
    ("signal", "Signals"): signal_number,
    ("_codecs", "encode"): latin,
    **_stand_ins("megatron.core.transformer.enums", "AttnBackend AttnMaskType AttnType LayerType ModelType"),
    **_stand_ins("megatron.core.transformer.enums", "CudaGraphModule CudaGraphScope InferenceCudaGraphScope"),
    **_stand_ins("megatron.core.enums", "ModelType Fp8Recipe Fp4Recipe"),
    **_stand_ins("megatron.core.rerun_state_machine", "RerunDiagnostic RerunMode RerunState"),
    **_stand_ins("megatron.core.inference.config", "KVCacheManagementMode"),
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, raw: bytes, known: dict[tuple[str, str], Any], file: str) -> None:
        super().__init__(io.BytesIO(raw))
        self._known = known
        self._file = file

    def find_class(self, module: str, name: str) -> Any:
        found = self._known.get((module, name))
        if found is None:
            raise CheckpointError(
                f"{self._file}: its pickle wants {module}.{name}, which is not on the list of what checkpoints need; "
                "nothing of it was run\n  fix: do not use this file unless you know who wrote it; if you do, "
                "load and save it again without that object"
            )
        return found

    def persistent_load(self, pid: Any) -> Storage:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage"):
            raise pickle.UnpicklingError("an unknown reference")
        _, dtype, key, _, numel = pid
        if not isinstance(dtype, torch.dtype) or not isinstance(key, str) or type(numel) is not int:
            raise pickle.UnpicklingError("an unknown storage")
        return Storage(key, dtype, numel)


def load_metadata(raw: bytes, file: str) -> Any:
    """Value of a ``.metadata`` file of torch's, megatron-core's or HyperParallel's checkpoints.

    Args:
        raw: The pickle.
        file: Path for messages.

    Returns:
        Stand-ins, dicts, tuples and plain values.

    Raises:
        CheckpointError: If it wants a global that is not on the list, or is no pickle.
    """
    return _load(raw, _METADATA, file)


def load_values(raw: bytes, file: str) -> Any:
    """Value of the pickle inside a torch.save archive.

    Args:
        raw: The pickle.
        file: Path for messages.

    Returns:
        Plain values; tensors as :class:`Stored`, enums of other packages as :class:`StandIn`.

    Raises:
        CheckpointError: If it wants a global that is not on the list, or is no pickle.
    """
    return _load(raw, _VALUES, file)


def _load(raw: bytes, known: dict[tuple[str, str], Any], file: str) -> Any:
    try:
        return _settled(_Unpickler(raw, known, file).load(), {})
    except CheckpointError:
        raise
    except Exception as error:  # whatever a damaged pickle makes the unpickler do
        raise DamageError(f"{file} is damaged: its pickle cannot be read ({error})") from error


def _settled(value: Any, seen: dict[int, Any]) -> Any:
    """The value with arrays in place of their stand-ins. Containers are changed in place where they can be."""
    if isinstance(value, Array):
        return settled_array(value)
    if isinstance(value, Dtype):
        return str(element(value))
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_settled(item, seen) for item in value)
    if isinstance(value, dict | argparse.Namespace):
        seen[id(value)] = value
        items = value if isinstance(value, dict) else vars(value)
        for key, item in items.items():
            if isinstance(item, tuple | list | dict | argparse.Namespace | Array | Dtype):
                items[key] = _settled(item, seen)
    elif isinstance(value, list):
        seen[id(value)] = value
        for index, item in enumerate(value):
            if isinstance(item, tuple | list | dict | argparse.Namespace | Array | Dtype):
                value[index] = _settled(item, seen)
    return value
