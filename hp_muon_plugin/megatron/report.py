"""What an installation of the plugin did, and what happened since."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hp_muon_plugin.config.data_parallel import HpFsdp
from hp_muon_plugin.errors import HookError
from hp_muon_plugin.megatron.first_step import LEFT_OUT, Trained, trainable
from hp_muon_plugin.megatron.hooks import OPTIMIZER, Installed
from hp_muon_plugin.megatron.options import Given
from hp_muon_plugin.megatron.versions import CoreVersion
from hp_muon_plugin.muon.gradients import listed

logger = logging.getLogger(__name__)


class Select(StrEnum):
    """When the plugin's optimizer is built."""

    by_name = "by_name"
    """For ``OptimizerConfig.optimizer == 'hp_muon'`` only."""
    always = "always"
    """For every optimizer, whatever its name: for trainers whose ``--optimizer`` takes no new names."""


@dataclass(slots=True)
class Report:
    """What :func:`install` did, and what happened since.

    Attributes:
        version: megatron-core.
        select: When the plugin's optimizer is built.
        given: Options that were given; the rest comes from Megatron's configuration.
        data_parallel: Options of the wrapper that takes the place of DistributedDataParallel, or None.
        hooks: Hooks in place.
        num_built: Optimizers that the plugin has built.
        num_wrapped: Model chunks that the plugin has wrapped.
        strict: Whether a way around the plugin is an error; else it is logged.
        trained: What was wrapped, and what some optimizer updates.
    """

    version: CoreVersion
    select: Select
    given: Given
    data_parallel: HpFsdp | None = None
    hooks: list[Installed] = field(default_factory=list)
    num_built: int = 0
    num_wrapped: int = 0
    strict: bool = True
    trained: Trained = field(default_factory=Trained)

    def __str__(self) -> str:
        chosen = "in the place of every optimizer" if self.select is Select.always else "chosen by its name"
        lines = [f"hp_muon in megatron-core {self.version}, {chosen}"]
        if self.data_parallel is not None:
            lines.append(f"  sharded: {self.data_parallel.replicas} replicas, outer={self.data_parallel.outer}")
        for installed in self.hooks:
            lines.append(f"  {installed.hook.name} ({installed.hook.kind}): {', '.join(installed.names())}")
        return "\n".join(lines)

    def is_selected(self, config: Any) -> bool:
        """Whether the plugin's optimizer is meant for a configuration.

        Args:
            config: megatron-core's ``OptimizerConfig``.

        Returns:
            True if so.
        """
        return self.select is Select.always or getattr(config, "optimizer", None) == OPTIMIZER

    def note_built(self, optimizer: Any, chunks: Sequence[Any]) -> None:
        """Remember that Megatron's factory was asked for an optimizer.

        Args:
            optimizer: The plugin's, or None where Megatron builds its own.
            chunks: Model chunks that it updates.
        """
        for chunk in chunks:
            self.trained.note_updated(param for _, param in trainable(chunk))
        if optimizer is not None:
            self.num_built += 1
            optimizer.first_step.trained, optimizer.first_step.is_strict = self.trained, self.strict

    def note_registered(self, chunks: Sequence[Any]) -> None:
        """Remember that Megatron's own factory took the plugin's optimizer from its table.

        Args:
            chunks: Model chunks that it updates.
        """
        self.note_built(None, chunks)
        self.num_built += 1

    def note_sharded(self, chunk: Any) -> None:
        """Remember a chunk that the plugin has wrapped.

        Args:
            chunk: An ``HpFsdpModel``.
        """
        self.num_wrapped += 1
        self.trained.note_wrapped(chunk)
        chunk.first_sync = self._refuse_left_out

    def _refuse_left_out(self, chunk: Any) -> None:
        """Refuse the first gradients of a chunk that no optimizer updates."""
        names = self.trained.left_out(chunk)
        if names and self.strict:
            raise HookError(LEFT_OUT.format(listed(names)))
        if names:
            logger.warning(LEFT_OUT.format("%s"), listed(names))

    def assert_used(self) -> None:
        """Raise if the trainer took a way around the plugin: it built no optimizer, or wrapped no model.

        Raises:
            HookError: Saying what to look for.
        """
        if self.data_parallel is not None and self.num_wrapped == 0:
            raise HookError(
                "the model was to be sharded, but the trainer wrapped it by another way\n"
                "  fix: call install() before the trainer builds its model, and let it use "
                "megatron.core.distributed.DistributedDataParallel itself, no class made from it"
            )
        if self.num_built == 0:
            raise HookError(
                "hp_muon was installed, but the trainer built its optimizer by another way\n"
                "  fix: call install() before the trainer builds its model, and let it use "
                "megatron.core.optimizer.get_megatron_optimizer"
            )
