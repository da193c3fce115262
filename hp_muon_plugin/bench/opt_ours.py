"""Our contenders of ``hp-muon bench optimizer``."""

from functools import partial
from typing import Any

from torch import nn

from hp_muon_plugin.bench.opt_cases import Model
from hp_muon_plugin.bench.opt_contenders import OURS, Builder, Contender, Setting, torch_sharded
from hp_muon_plugin.bench.opt_convention import LEARNING_RATE, MOMENTUM, WEIGHT_DECAY, Convention
from hp_muon_plugin.config.choices import Strategy
from hp_muon_plugin.fsdp import hp_fully_shard
from hp_muon_plugin.muon import build_optimizer

CONVENTION = Convention()
REPLICATED = "replicated"
"""Every rank holds all gradients and does all the work, as under DDP: what needs no strategy."""
DEFAULT: tuple[str, ...] = tuple(Strategy)
STRATEGIES: tuple[str, ...] = (*DEFAULT, REPLICATED)


def contenders(strategies: tuple[str, ...]) -> dict[str, Builder]:
    """Ours, by name.

    Args:
        strategies: Which.

    Returns:
        One contender for each strategy and each way of sharding.
    """
    found: dict[str, Builder] = {}
    for strategy in strategies:
        if strategy == REPLICATED:
            found[f"{OURS} {strategy}"] = build_replicated
            continue
        found[f"{OURS} {strategy} (hp)"] = partial(build_hp, strategy=strategy)
        found[f"{OURS} {strategy} (fsdp2)"] = partial(build_fsdp2, strategy=strategy)
    return found


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


def build_replicated(setting: Setting) -> Contender:
    """Every rank does everything."""
    return Contender(Model(setting.case, is_stacked=True), setting, make)


def build_hp(setting: Setting, *, strategy: str) -> Contender:
    """Over our ``hp_fully_shard``."""
    model = Model(setting.case, is_stacked=True)
    for layer in model.layers:
        hp_fully_shard(layer, setting.mesh)
    hp_fully_shard(model, setting.mesh)
    return Contender(model, setting, partial(make, strategy=strategy))


def build_fsdp2(setting: Setting, *, strategy: str) -> Contender:
    """Over torch's ``fully_shard``."""
    return torch_sharded(setting, partial(make, strategy=strategy))
