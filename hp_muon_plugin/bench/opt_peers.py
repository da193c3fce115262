"""Peers of ``hp-muon bench optimizer`` that are optimizers over torch's ``fully_shard``.

Every library is imported as it is installed. What its own code asks for and a CPU lacks is stood in for, see
:mod:`~hp_muon_plugin.bench.opt_stand_ins`; ``torch.compile`` is off for all, so that nobody's first steps compile.
"""

import importlib
from functools import partial
from typing import Any

from torch import nn

from hp_muon_plugin.bench.opt_contenders import Contender, Peer, Setting, parameters_of, torch_sharded
from hp_muon_plugin.bench.opt_convention import LEARNING_RATE, MOMENTUM, WEIGHT_DECAY, Convention, Decay
from hp_muon_plugin.bench.opt_stand_ins import stand_in_for_triton
from hp_muon_plugin.config.choices import ScaleMode, Schedule

_EAGER = {"TORCHDYNAMO_DISABLE": "1"}
_BF16 = "bfloat16"


def torch_muon(setting: Setting) -> Contender:
    """torch's own, over DTensors; it knows matrices only."""

    def make(model: nn.Module) -> Any:
        muon = importlib.import_module("torch.optim").Muon
        options = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "momentum": MOMENTUM}
        return muon(parameters_of(model), **options, adjust_lr_fn="match_rms_adamw")

    return torch_sharded(setting, make, is_stacked=False)


def muonium(setting: Setting, *, module: str, name: str) -> Contender:
    """muonium and dtensor-muon, which are one code base, with the loop that they have for no triton."""
    with stand_in_for_triton():
        muon = getattr(importlib.import_module(module), name)
    inner = importlib.import_module(f"{module}.orthogonalize.orthogonalize")
    inner._get_orthogonalization_fn = lambda strategy, use_triton: inner.ns_loop  # type: ignore[attr-defined]

    def make(model: nn.Module) -> Any:
        group = {"params": parameters_of(model), "algorithm": "muon", "flatten": False}
        options: dict[str, Any] = {"lr": LEARNING_RATE, "wd": WEIGHT_DECAY, "momentum": MOMENTUM}
        return muon([group], **options, use_cautious_wd=False, orthogonalization_strategy="newton_schulz")

    return torch_sharded(setting, make)


def muon_fsdp2(setting: Setting) -> Contender:
    """samsja's muon-fsdp2; matrices only, since its scale takes the number of experts for rows."""

    def make(model: nn.Module) -> Any:
        group = {"params": parameters_of(model), "lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "use_muon": True}
        return importlib.import_module("muon_fsdp2").Muon([{**group, "momentum": MOMENTUM, "rms_scale": True}])

    return torch_sharded(setting, make, is_stacked=False)


def heavyball(setting: Setting) -> Contender:
    """heavyball's Muon; matrices only, since it merges dimensions."""

    def make(model: nn.Module) -> Any:
        library = importlib.import_module("heavyball")
        library.utils.compile_mode = None
        options = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "betas": (MOMENTUM, 0.99)}
        return library.Muon(parameters_of(model), **options, compile_step=False)

    return torch_sharded(setting, make, is_stacked=False)


def emerging_optimizers(setting: Setting) -> Contender:
    """NVIDIA's emerging-optimizers, over DTensors; matrices only."""

    def make(model: nn.Module) -> Any:
        library = importlib.import_module("emerging_optimizers.orthogonalized_optimizers.muon")
        options = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "momentum": MOMENTUM, "nesterov": True}
        scale = {"scale_mode": "spectral", "extra_scale_factor": 0.2}
        return library.Muon(
            parameters_of(model), **options, **scale, coefficient_type="simple", fp32_matmul_prec="highest"
        )

    return torch_sharded(setting, make, is_stacked=False)


_SHAPE_SCALED = Convention(scale=ScaleMode.shape_scaling, dtype=_BF16, decay=Decay.scaled)
# Its look-ahead adds the gradient in full to the moving average, and the cast to bf16 rounds at random.
_HEAVYBALL = Convention(ScaleMode.shape_scaling, Schedule.you, _BF16, grad_share=1.0)

PEERS: dict[str, Peer] = {
    "torch.optim.Muon": Peer(torch_muon, Convention(dtype=_BF16), "torch.optim._muon"),
    "muonium": Peer(
        partial(muonium, module="muonium", name="Muon"),
        _SHAPE_SCALED,
        "muonium",
        ("muonium",),
        about="its loop without triton",
        environment=_EAGER,
    ),
    "dtensor-muon": Peer(
        partial(muonium, module="dtensor_muon", name="Muon"),
        _SHAPE_SCALED,
        "dtensor_muon",
        ("dtensor-muon",),
        about="its loop without triton; MuonForeach needs CUDA",
        environment=_EAGER,
    ),
    "muon-fsdp2": Peer(
        muon_fsdp2, Convention(dtype=_BF16), "muon_fsdp2", ("muon-fsdp2",), has_replicas=False, environment=_EAGER
    ),
    "heavyball": Peer(heavyball, _HEAVYBALL, "heavyball", ("heavyball",), environment=_EAGER),
    "emerging-optimizers": Peer(
        emerging_optimizers,
        Convention(),
        "emerging_optimizers",
        ("emerging-optimizers",),
        needs_python=(3, 12),
        venv="python312",
        environment=_EAGER,
    ),
}
