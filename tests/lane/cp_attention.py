"""Attention over context-parallel ranks by gathering keys and values: megatron-core has it in Transformer Engine only.

What data-parallel wrappers have to do with context parallelism (gradients are summed over these ranks too, weights
sharded over them) does not depend on how attention sends its keys.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention


class _Gathered(torch.autograd.Function):
    """Parts of all ranks along dim 0; backward sums what all ranks have for this rank's part."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class GatheredAttention(DotProductAttention):  # type: ignore[misc]
    """Causal attention of this rank's queries to the keys of all context-parallel ranks."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        super().__init__(alone, *args, **kwargs)

    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        group = parallel_state.get_context_parallel_group()
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        keys, values = (_Gathered.apply(tensor, group) for tensor in (key, value))
        chunks = torch.arange(query.shape[0] * size).chunk(2 * size)
        held = [torch.cat([chunks[place], chunks[2 * size - 1 - place]]) for place in range(size)]
        hidden = torch.cat(held)[None, :] > held[rank][:, None]
        return super().forward(query, keys, values, hidden[None, None], *args, **kwargs)
