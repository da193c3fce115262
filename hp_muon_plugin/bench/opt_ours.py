"""Our contenders of ``hp-muon bench optimizer``."""

from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from hp_muon_plugin.bench.opt_cases import Model
from hp_muon_plugin.bench.opt_contenders import OURS, Builder, Contender, Run, Setting, torch_sharded
from hp_muon_plugin.bench.opt_convention import LEARNING_RATE, MOMENTUM, WEIGHT_DECAY, Convention
from hp_muon_plugin.bench.opt_memory import SHARDED, WHOLE
from hp_muon_plugin.config.choices import FloatDtype, OuterMode, Strategy
from hp_muon_plugin.fsdp import hp_fully_shard
from hp_muon_plugin.fsdp.roots import schedule_of
from hp_muon_plugin.muon import build_optimizer
from hp_muon_plugin.muon.distributed.shards import shards_of

CONVENTION = Convention()
_HALF_CONVENTION = Convention(dtype="bfloat16")
REPLICATED = "replicated"
"""Every rank holds all gradients and does all the work, as under DDP: what needs no strategy."""
MEASURED = "measured"
"""``strategy=auto`` by rates that it measures at start, and not by the device's default: for slow links."""
HALF = "auto-bf16"
"""``strategy=auto`` in bfloat16, messages too: the type that most peers iterate in."""
DEFAULT: tuple[str, ...] = (*Strategy, HALF)
STRATEGIES: tuple[str, ...] = (*DEFAULT, MEASURED, REPLICATED)


def contenders(strategies: tuple[str, ...], *, replicas: int) -> dict[str, Builder]:
    """Ours, by name.

    Args:
        strategies: Which.
        replicas: Size of the replicate axis.

    Returns:
        One contender for each strategy and each way of sharding; with replicas, ``auto`` also in the modes
        that divide matrices between them.
    """
    found: dict[str, Builder] = {}
    for strategy in strategies:
        if strategy == REPLICATED:
            found[f"{OURS} {strategy}"] = build_replicated
            continue
        found[f"{OURS} {strategy} (hp)"] = partial(build_hp, strategy=strategy)
        found[f"{OURS} {strategy} (fsdp2)"] = partial(build_fsdp2, strategy=strategy)
        if replicas > 1 and strategy == Strategy.auto:
            for outer in (OuterMode.broadcast, OuterMode.shard):
                found[f"{OURS} {strategy} (hp {outer})"] = partial(build_hp, strategy=strategy, outer=outer)
    return found


def convention_of(name: str) -> Convention:
    """What a step of one of ours is.

    Args:
        name: Of the contender.

    Returns:
        Its convention.
    """
    return _HALF_CONVENTION if HALF in name else CONVENTION


def copies_of(name: str) -> float:
    """How much of the model a rank holds of one of ours.

    Args:
        name: Of the contender.

    Returns:
        Whole float32 models.
    """
    return WHOLE if any(strategy in name for strategy in (REPLICATED, Strategy.allgather)) else SHARDED


def make(model: nn.Module, **options: Any) -> Any:
    """Our optimizer, without clipping, which no peer does.

    Args:
        model: Whose parameters.
        **options: More options.

    Returns:
        The optimizer.
    """
    return build_optimizer(
        model, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, momentum=MOMENTUM, clip_grad=0.0, **options
    )


class HpContender(Contender):
    """A model under ``hp_fully_shard``; a step ends when the weights of other replicas have arrived, too."""

    @cached_property
    def _owned(self) -> set[nn.Parameter]:
        return {shard.param for shard in shards_of(self.model) if shard.is_owned}

    def step(self) -> None:
        """See :meth:`Contender.step`."""
        super().step()
        schedule_of(self.model).settle_weights()

    def set_gradient(self, run: Run, grad: torch.Tensor) -> None:
        """Only the replica that updates a parameter holds its gradient."""
        if run.parameter in self._owned:
            super().set_gradient(run, grad)


def build_replicated(setting: Setting) -> Contender:
    """Every rank does everything."""
    return Contender(Model(setting.case, is_stacked=True), setting, make)


def _options(strategy: str) -> dict[str, Any]:
    if strategy == HALF:
        half = FloatDtype.bfloat16
        return {"strategy": Strategy.auto, "ns_dtype": half, "comm_dtype": half}
    return {"strategy": Strategy.auto, "rates": {"measure": True}} if strategy == MEASURED else {"strategy": strategy}


def build_hp(setting: Setting, *, strategy: str, outer: OuterMode = OuterMode.replicate) -> Contender:
    """Over our ``hp_fully_shard``."""
    model = Model(setting.case, is_stacked=True)
    for layer in model.layers:
        hp_fully_shard(layer, setting.mesh)
    hp_fully_shard(model, setting.mesh, outer=outer)
    return HpContender(model, setting, partial(make, **_options(strategy)))


def build_fsdp2(setting: Setting, *, strategy: str) -> Contender:
    """Over torch's ``fully_shard``."""
    return torch_sharded(setting, partial(make, **_options(strategy)))
