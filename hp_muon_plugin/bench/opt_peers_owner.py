"""Peers of ``hp-muon bench optimizer`` that send whole matrices to owners: torchtitan and VeOmni.

Their packages import a training framework; only the optimizer is imported here.
"""

import importlib
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from hp_muon_plugin.bench.opt_contenders import Contender, Peer, Setting, parameters_of, torch_sharded
from hp_muon_plugin.bench.opt_convention import LEARNING_RATE, MOMENTUM, WEIGHT_DECAY, Convention
from hp_muon_plugin.bench.opt_stand_ins import bare_packages, dist_with_uneven_lists, torch_with_streams

_OPTIONS = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "momentum": MOMENTUM, "adjust_lr_fn": "match_rms_adamw"}


def torchtitan(setting: Setting) -> Contender:
    """DistMuon of torchtitan: ``Owned`` matrices, ``Shard(0)`` for experts, one bucket per layer as its recipe has."""
    bare_packages("torchtitan", "torchtitan.distributed")
    library = importlib.import_module("torchtitan.distributed.flex_shard")
    runtime = importlib.import_module("torchtitan.distributed.flex_shard._optimizer_reshard_runtime")
    muon = importlib.import_module("torchtitan.distributed.flex_shard.dist_muon")
    runtime.torch = torch_with_streams()  # type: ignore[attr-defined]
    muon.DistMuon._validate_parameter_storage = lambda self: torch.device("cpu")  # it asks for CUDA
    names = setting.mesh.mesh_dim_names or ()
    replicated = {name: importlib.import_module("torch.distributed.tensor").Replicate() for name in names[:-1]}

    def make(model: nn.Module) -> Any:
        named = dict(model.named_parameters())
        layouts = {
            name: library.ComputeLayout(
                shardings_by_mesh_axis={
                    **replicated,
                    names[-1]: Shard(0) if parameter.ndim == 3 else library.Owned(),
                }
            )
            for name, parameter in named.items()
        }
        group = {"params": list(named.values()), "param_names": list(named)}
        layers = sorted({name.rsplit(".", 1)[0] for name in named})
        buckets = []
        for layer in layers:  # a bucket has one transport: experts that stay local are another
            for is_stack in (False, True):
                patterns = tuple(n for n, p in named.items() if n.startswith(f"{layer}.") and (p.ndim == 3) == is_stack)
                if patterns:
                    buckets.append(library.BucketConfig(patterns=patterns, name=f"{layer} {is_stack}"))
        return library.build_dist_muon([group], compute_sharding_by_fqn=layouts, bucket_configs=buckets, **_OPTIONS)

    return torch_sharded(setting, make)


def veomni(setting: Setting) -> Contender:
    """VeOmni's DistributedMuon, with torch's Newton-Schulz: its fp16 Gram form takes seconds on a CPU."""
    bare_packages("veomni", "veomni.utils", "veomni.optim")
    library = importlib.import_module("veomni.optim.muon")
    library.dist = dist_with_uneven_lists()  # type: ignore[attr-defined]

    def make(model: nn.Module) -> Any:
        return library.DistributedMuon(parameters_of(model), **_OPTIONS, ns_implementation="std")

    return torch_sharded(setting, make)


_BF16 = Convention(dtype="bfloat16")

PEERS: dict[str, Peer] = {
    "torchtitan DistMuon": Peer(
        torchtitan,
        _BF16,
        "torchtitan",
        no_dependencies=("torchtitan",),
        about="its optimizer alone is imported; CUDA streams stood in for, so that nothing overlaps",
    ),
    "VeOmni": Peer(
        veomni,
        _BF16,
        "veomni",
        ("packaging",),
        no_dependencies=("veomni",),
        about="its optimizer alone is imported; ns_implementation=std; uneven lists in all_to_all stood in for",
    ),
}
