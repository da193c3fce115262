"""HP-FSDP in a trainer that wraps its model itself: behind DistributedDataParallel's constructor."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel

from hp_muon_plugin.config.data_parallel import HpFsdp
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.megatron.optimizer import HpMuonMegatronOptimizer
from hp_muon_plugin.megatron.options import resolve_options
from hp_muon_plugin.megatron.sharded_build import all_adamw, build_sharded_optimizer
from hp_muon_plugin.megatron.sharded_model import HpFsdpModel, add_no_sync


def sharding_init(
    original: Callable[..., None], options: HpFsdp, note: Callable[[HpFsdpModel], None] = lambda chunk: None
) -> Callable[..., None]:
    """A constructor that makes the object one of ours.

    The class of the object changes while it is built, and not later: whoever calls
    ``DistributedDataParallel(...)``, by whatever name, gets an :class:`HpFsdpModel`.

    Args:
        original: DistributedDataParallel's own, for its subclasses.
        options: Options.
        note: Called with every chunk that is sharded.

    Returns:
        The constructor.
    """

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is not DistributedDataParallel:
            original(self, *args, **kwargs)
            return
        self.__class__ = HpFsdpModel
        self.__init__(*args, options=options, **kwargs)
        if not self.ddp_config.overlap_grad_reduce:  # with it, Megatron's trainers set the function, and want none
            add_no_sync(self.config, self)
        note(self)

    return init


def build_for_shards(
    config: Any, chunks: Sequence[Any], arguments: Mapping[str, Any]
) -> HpMuonMegatronOptimizer | None:
    """AdamW over shards, by Megatron's configuration.

    Args:
        config: megatron-core's ``OptimizerConfig``.
        chunks: Model chunks as the factory got them.
        arguments: What else it got, by name.

    Returns:
        The optimizer, or None where no chunk is sharded.

    Raises:
        ConfigError: If the configuration asks for another optimizer, which would take shards for whole weights.
    """
    sharded = [chunk for chunk in chunks if isinstance(chunk, HpFsdpModel)]
    if not sharded:
        return None
    if config.optimizer != "adam":
        raise ConfigError(
            "optimizer",
            config.optimizer,
            "would take shards for whole weights",
            "choose adam or hp_muon, or leave data_parallel out of install()",
        )
    return build_sharded_optimizer(config, sharded, resolve_options(None, config), all_adamw, arguments=arguments)
