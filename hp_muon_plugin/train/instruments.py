"""What can be measured in a step, one class for each. All of them leave values on the device.

Every rank has the same instruments in the same order and calls every method, because ``measure`` is
collective. What a rank does not hold it leaves at zero.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_layer import TransformerLayer

from hp_muon_plugin.megatron.groups import MegatronGroups
from hp_muon_plugin.megatron.qk_clip import QkClip
from hp_muon_plugin.platform.collectives import all_reduce_max, all_reduce_sum, sum_over_ranks
from hp_muon_plugin.platform.spans import COMMUNICATION, NEWTON_SCHULZ, Recorder

FORWARD_BACKWARD = "forward_backward"
OPTIMIZER = "optimizer"


class Instrument(Protocol):
    """One kind of measurement."""

    def begin(self) -> None:
        """A step that is measured begins."""

    def before_update(self) -> None:
        """Gradients are there, weights are as they were."""

    def measure(self) -> torch.Tensor:
        """Weights are updated: sums over all ranks. Collective.

        Returns:
            ``(n,)`` float32 on the device, the same on every rank.
        """

    def metrics(self, values: Sequence[float]) -> dict[str, float]:
        """Metrics by name.

        Args:
            values: What :meth:`measure` returned, on the host.
        """


class OutputRms:
    """RMS of each transformer layer's output, over all micro-batches and ranks.

    Tensor-parallel ranks that hold the same activations count them once each, in the sum of squares
    as in the number of elements.

    Args:
        chunks: Model chunks of this rank.
        num_layers: Layers of the whole model.
        device: Where the model lives.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], num_layers: int, device: torch.device) -> None:
        self._squares = torch.zeros(num_layers, device=device)
        self._counts = [0.0] * num_layers
        self._is_on = False
        for chunk in chunks:
            for name, module in chunk.named_modules():
                if isinstance(module, TransformerLayer) and ".mtp." not in name:
                    module.register_forward_hook(self._look)

    def begin(self) -> None:
        """Forget, and look at the forward passes that follow."""
        self._squares.zero_()
        self._counts = [0.0] * len(self._counts)
        self._is_on = True

    def before_update(self) -> None:
        """The forward passes are over."""
        self._is_on = False

    @torch.no_grad()
    def _look(self, module: Any, arguments: Any, output: Any) -> None:
        if not self._is_on or not module.training:
            return
        hidden, layer = output[0] if isinstance(output, tuple) else output, module.layer_number - 1
        self._squares[layer] += torch.linalg.vector_norm(hidden.detach(), dtype=torch.float32).square()
        self._counts[layer] += hidden.numel()

    def measure(self) -> torch.Tensor:
        """``(2 L,)``: sums of squares, and how many elements."""
        values = torch.cat([self._squares, torch.tensor(self._counts, device=self._squares.device)])
        sum_over_ranks(values, "activations")  # all ranks, 8 bytes per layer; the host waits on CPU
        return values

    def metrics(self, values: Sequence[float]) -> dict[str, float]:
        """``rms/output/layer000`` and so on."""
        half = len(values) // 2
        pairs = zip(values[:half], values[half:], strict=True)
        return {f"rms/output/layer{layer:03d}": root(square, count) for layer, (square, count) in enumerate(pairs)}


class TimeShares:
    """How the time of the step divides, in means over the ranks.

    Args:
        device: Where the work is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.recorder = Recorder(device)

    def begin(self) -> None:
        """Start from zero."""
        self.recorder = Recorder(self._device)

    def before_update(self) -> None:
        """Nothing."""

    def measure(self) -> torch.Tensor:
        """``(5,)`` milliseconds, means over all ranks."""
        totals = self.recorder.totals_ms()

        def total(phase: str, name: str = "") -> float:
            return totals.get((phase, name), 0.0)

        own = [
            total(FORWARD_BACKWARD),
            total(OPTIMIZER),
            total(OPTIMIZER, NEWTON_SCHULZ),
            total(OPTIMIZER, COMMUNICATION),
            total(FORWARD_BACKWARD, COMMUNICATION),
        ]
        values = torch.tensor(own, device=self._device) / dist.get_world_size()
        sum_over_ranks(values, "times")  # all ranks, 20 bytes; the host waits on CPU
        return values

    def metrics(self, values: Sequence[float]) -> dict[str, float]:
        """``time/..._ms`` and ``share/...``."""
        forward_backward, optimizer, newton_schulz, in_optimizer, elsewhere = values
        step = forward_backward + optimizer
        return {
            "time/step_ms": step,
            "time/optimizer_ms": optimizer,
            "time/newton_schulz_ms": newton_schulz,
            "time/communication_ms": in_optimizer + elsewhere,
            "share/optimizer_of_step": ratio(optimizer, step),
            "share/newton_schulz_of_optimizer": ratio(newton_schulz, optimizer),
            "share/newton_schulz_of_step": ratio(newton_schulz, step),
            "share/communication_of_optimizer": ratio(in_optimizer, optimizer),
            "share/communication_of_step": ratio(in_optimizer + elsewhere, step),
        }


class MaxLogits:
    """Largest attention logit of the step and how many heads QK-clip has scaled.

    Args:
        qk_clip: What clips.
        groups: Megatron's groups.
        threshold: ``optimizer.qk_clip``.
    """

    def __init__(self, qk_clip: QkClip, groups: MegatronGroups, threshold: float) -> None:
        self._qk_clip, self._axis, self._threshold = qk_clip, groups.dense_stats, threshold

    def begin(self) -> None:
        """Nothing."""

    def before_update(self) -> None:
        """Nothing."""

    def measure(self) -> torch.Tensor:
        """``(2,)``: the largest logit, the number of heads above the threshold."""
        largest = self._qk_clip.largest_last  # of the step; data-parallel ranks have the same
        above = (largest > self._threshold).sum().float().reshape(1)
        top = torch.cat([largest, largest.new_full((1,), float("-inf"))]).amax().reshape(1)
        all_reduce_sum(above, self._axis)  # tensor- and pipeline-parallel ranks, 4 bytes; the host waits on CPU
        all_reduce_max(top, self._axis)  # likewise
        return torch.cat([top, above])

    def metrics(self, values: Sequence[float]) -> dict[str, float]:
        """``attention/...``."""
        return {"attention/max_logit": values[0], "attention/clipped_heads": values[1]}


def root(square: float, count: float) -> float:
    """The root of a mean; NaN of nothing."""
    return math.sqrt(ratio(square, count))


def ratio(part: float, whole: float) -> float:
    """``part / whole``; NaN of nothing."""
    return part / whole if whole else float("nan")
