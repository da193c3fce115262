"""Measuring some steps of a run: the values stay on the device until they are read with the loss."""

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.megatron.measured import measured_params
from hp_muon_plugin.megatron.optimizer import HpMuonMegatronOptimizer
from hp_muon_plugin.train.instruments import Instrument, MaxLogits, OutputRms, TimeShares
from hp_muon_plugin.train.weight_instruments import SingularValues, WeightRms

_OF_AN_UPDATE = ("rms/update/", "singular/", "attention/")

logger = logging.getLogger(__name__)


class Monitor:
    """Measures the first step, the last one, and every ``monitor.interval``-th. All methods are collective.

    Other steps run as without it: hooks look at a flag, and nothing is copied, reduced or read.

    Args:
        config: Options.
        chunks: Wrapped model chunks of this rank.
        optimizer: A MegatronOptimizer.
        device: Where the model lives.
    """

    def __init__(self, config: Train, chunks: Sequence[torch.nn.Module], optimizer: Any, device: torch.device) -> None:
        self._interval, self._last = config.monitor.interval, config.run.steps
        self._is_measuring = False
        self._times = TimeShares(device) if config.monitor.times else None
        self._instruments: list[Instrument] = []
        if self._interval:
            self._instruments = _instruments(config, chunks, optimizer, device)
            if self._times is not None:
                self._instruments.append(self._times)

    def begin(self, step: int) -> None:
        """A step begins.

        Args:
            step: Its number, from 1.
        """
        self._is_measuring = bool(self._instruments) and (step % self._interval == 0 or step in (1, self._last))
        if self._is_measuring:
            for instrument in self._instruments:
                instrument.begin()

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Measure the time of what is inside, if the step is measured.

        Args:
            name: ``FORWARD_BACKWARD`` or ``OPTIMIZER``.

        Returns:
            A context manager.
        """
        if not self._is_measuring or self._times is None:
            return contextlib.nullcontext()
        return self._times.recorder.phase(name)

    def before_update(self) -> None:
        """Gradients are there, weights are as they were."""
        if self._is_measuring:
            for instrument in self._instruments:
                instrument.before_update()

    def read(self, loss: torch.Tensor, *, is_updated: bool = True) -> tuple[float, dict[str, float]]:
        """Read the loss, and with it what was measured: one transfer from the device.

        Args:
            loss: ``(1,)`` float32.
            is_updated: Whether the step was taken; otherwise there is nothing to say of its update.

        Returns:
            The loss, and metrics by name; none for a step that is not measured.
        """
        if not self._is_measuring:
            return float(loss.item()), {}
        self._is_measuring = False
        found = [instrument.measure() for instrument in self._instruments]
        value, *values = torch.cat([loss, *found]).tolist()
        metrics: dict[str, float] = {}
        for instrument, length in zip(self._instruments, map(len, found), strict=True):
            metrics |= instrument.metrics(values[:length])
            values = values[length:]
        return value, {k: v for k, v in metrics.items() if is_updated or not k.startswith(_OF_AN_UPDATE)}


def _instruments(
    config: Train, chunks: Sequence[torch.nn.Module], optimizer: Any, device: torch.device
) -> list[Instrument]:
    options, found = config.monitor, list[Instrument]()
    params, groups = measured_params(chunks, optimizer)
    if options.weights or options.updates:
        found.append(
            WeightRms(
                params,
                groups,
                device,
                has_weights=options.weights,
                has_updates=options.updates,
                per_layer=options.per_layer,
            )
        )
    if options.outputs:
        found.append(OutputRms(chunks, config.model.num_layers, device))
    if isinstance(config.optimizer, HpMuon) and isinstance(optimizer, HpMuonMegatronOptimizer):
        if options.singular_values:
            sample = SingularValues(params, groups, config.optimizer, optimizer.param_groups, device)
            found.append(sample)
            if dist.get_rank() == 0:
                names = ", ".join(spec.name for spec in sample.sample)
                logger.info("singular values are measured of the first matrix of %s", names)
        if optimizer.qk_clip is not None and config.optimizer.qk_clip is not None:
            found.append(MaxLogits(optimizer.qk_clip, groups, config.optimizer.qk_clip))
    return found
