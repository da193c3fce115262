"""The largest attention logit of every head, recorded in forward without a read by the host."""

from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from hp_muon_plugin.megatron.attention_heads import refusal

_LOWEST = float("-inf")


class LocalLogits:
    """Looks at what megatron-core's own attention hands to its softmax.

    Args:
        core: The attention.
        largest: ``(heads,)`` float32 on the device, raised in place.
    """

    def __init__(self, core: DotProductAttention, largest: torch.Tensor) -> None:
        self._largest = largest
        core.scale_mask_softmax.register_forward_pre_hook(self._look)

    def begin(self) -> None:
        """Nothing besides the buffer, which its owner clears."""

    def collect(self) -> None:
        """Nothing: forward has written already."""

    @torch.no_grad()
    def _look(self, softmax: Any, arguments: tuple[Any, ...]) -> None:
        if not softmax.training:
            return
        scores, mask = arguments[0].detach(), arguments[1]  # (B, heads, Sq, Sk); True = hidden
        if mask is None and softmax.attn_mask_type is AttnMaskType.causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        seen = scores if mask is None else scores.masked_fill(mask, _LOWEST)
        found = seen.amax(dim=(0, 2, 3)).float()
        if softmax.scale is not None:
            found = found * softmax.scale
        torch.maximum(self._largest, found, out=self._largest)


class FusedLogits:
    """Takes them from Transformer Engine's attention, which computes them on request. Not run on hardware yet.

    megatron-core accumulates them over micro-batches; they are forgotten when the next step begins, not
    when they are read, because a trainer may log them after the optimizer's step.

    Args:
        core: The attention; its config has ``log_max_attention_logit``.
        largest: ``(heads,)`` float32 on the device.
    """

    def __init__(self, core: Any, largest: torch.Tensor) -> None:
        self._core, self._largest = core, largest
        self._is_first = True
        core.register_forward_pre_hook(self._forget)

    def begin(self) -> None:
        """Let the next forward forget what was accumulated."""
        self._is_first = True

    def collect(self) -> None:
        """Take over what the forward passes of the step have found."""
        found = self._core.current_max_attn_logits
        if found is not None:
            torch.maximum(self._largest, found.detach().float(), out=self._largest)

    def _forget(self, core: Any, arguments: tuple[Any, ...]) -> None:
        if self._is_first:
            core.current_max_attn_logits = None
            self._is_first = False


Logits = LocalLogits | FusedLogits


def record_logits(attention: Any, largest: torch.Tensor, name: str) -> Logits:
    """Record the largest logits of one attention layer from now on.

    Args:
        attention: A layer's self-attention.
        largest: ``(heads,)`` float32 on the device.
        name: Its name, for messages.

    Returns:
        What records.

    Raises:
        ConfigError: If its attention keeps the logits to itself.
    """
    core = attention.core_attention
    if isinstance(core, DotProductAttention):
        if getattr(core.scale_mask_softmax, "window_size", None) is not None:
            raise refusal(f"{name} sees a sliding window, which is not implemented", "leave window_size out")
        return LocalLogits(core, largest)
    if hasattr(core, "current_max_attn_logits"):
        return FusedLogits(core, largest)
    raise refusal(
        f"{name} uses {type(core).__name__}, which does not give its largest logits",
        "set log_max_attention_logit=True in TransformerConfig (megatron-core 0.16 and later, with a "
        "Transformer Engine that returns them)",
    )
