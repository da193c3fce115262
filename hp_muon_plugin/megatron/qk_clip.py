"""QK-clip (MuonClip): after a step, scale the queries and keys of heads whose logits grew too large.

Kimi K2 technical report (arXiv 2507.20534), section 2.1. The largest logit is that of the whole batch,
over all micro-batches and data- and context-parallel ranks. Heads are local to tensor-parallel ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hp_muon_plugin.megatron.attention_heads import HeadRows, head_rows, whole_shape
from hp_muon_plugin.megatron.max_logits import Logits, record_logits
from hp_muon_plugin.platform.collectives import AxisGroup, all_reduce_max

_LOWEST = float("-inf")


@dataclass(frozen=True, slots=True)
class _Scaled:
    """Rows of one weight that this rank updates.

    Attributes:
        main: What the optimizer updates: ``(rows, columns)``, or flat where a shard cuts a row.
        places: ``(rows, 1)`` int64, or ``(elements,)``: where the factor of each lies in the table.
    """

    main: torch.nn.Parameter
    places: torch.Tensor


class QkClip:
    """Records logits and clips. Every rank of the data-parallel axis makes one, for the same layers.

    Args:
        chunks: Model chunks, wrapped or not.
        mains: By parameter of the model: what the optimizer updates. Parameters that another rank or
            replica updates are missing.
        axis: Ranks that see other data: data x context parallel.
        threshold: Largest logit, ``tau``.

    Raises:
        ConfigError: If a layer's logits cannot be seen or scaled.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        mains: Mapping[torch.nn.Parameter, torch.nn.Parameter],
        axis: AxisGroup,
        threshold: float,
    ) -> None:
        self._axis, self._threshold = axis, threshold
        layers = [
            (name, module)
            for chunk in chunks
            for name, module in chunk.named_modules()
            if hasattr(module, "core_attention")
        ]
        counts = [int(module.num_attention_heads_per_partition) for _, module in layers]
        device = next((p.device for chunk in chunks for p in chunk.parameters()), torch.device("cpu"))
        self.largest = torch.full((sum(counts),), _LOWEST, device=device)
        """``(heads of all layers,)`` float32: largest logits since the last clip, of this rank."""
        self.largest_last = self.largest.clone()
        """The same over all ranks of the axis, at the last clip; on the device, for metrics."""
        self._logits: list[Logits] = []
        self._scaled: list[_Scaled] = []
        first = 0
        for (name, module), count in zip(layers, counts, strict=True):
            self._logits.append(record_logits(module, self.largest[first : first + count], name))
            for found in head_rows(module, name):
                self._take(found, mains, first)
            first += count

    def _take(self, found: HeadRows, mains: Mapping[torch.nn.Parameter, torch.nn.Parameter], first: int) -> None:
        weight = found.module.weight
        assert isinstance(weight, torch.nn.Parameter)
        if weight not in mains:
            return
        heads = torch.tensor(found.heads, device=weight.device) + first
        places = torch.tensor(found.powers, device=weight.device) * self.largest.numel() + heads  # (whole rows,)
        main, info = mains[weight], getattr(weight, "hp_shard", None)
        start = 0 if info is None else info.start
        if main.dim() == 2:
            begin = start // main.shape[1]
            self._scaled.append(_Scaled(main, places[begin : begin + main.shape[0], None]))
        else:
            columns = whole_shape(weight)[1:].numel()
            elements = torch.arange(start, start + main.numel(), device=weight.device)
            self._scaled.append(_Scaled(main, places[elements // columns]))

    def forget(self) -> None:
        """Begin a step: what was recorded for a step that was left out does not count."""
        self.largest.fill_(_LOWEST)
        for logits in self._logits:
            logits.begin()

    @torch.no_grad()
    def apply(self) -> None:
        """Scale what the optimizer has just updated. All ranks of the axis call it; the host reads nothing."""
        if not self._logits:
            return
        for logits in self._logits:
            logits.collect()
        self.largest_last.copy_(self.largest)
        all_reduce_max(self.largest_last, self._axis)  # 4 bytes per head of this stage; the host waits on CPU
        factors = clip_factors(self.largest_last, self._threshold)
        table = torch.cat([torch.ones_like(factors), factors.sqrt(), factors])  # in the order of Power
        for scaled in self._scaled:
            scaled.main.mul_(table[scaled.places])
        self.forget()


def clip_factors(largest: torch.Tensor, threshold: float) -> torch.Tensor:
    """By what each head's logits are multiplied.

    Args:
        largest: ``(heads,)`` largest logits.
        threshold: ``tau``.

    Returns:
        ``tau / largest`` where that is finite and above ``tau``, and exactly 1 elsewhere.
    """
    is_above = (largest > threshold) & torch.isfinite(largest)
    return torch.where(is_above, threshold / largest, torch.ones_like(largest))
