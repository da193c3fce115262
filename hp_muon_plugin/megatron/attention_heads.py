"""Which rows of which weights make a head's queries and keys, for QK-clip.

The rule (docs/monitoring.md has the derivation): with ``f = tau / max logit`` of a head,

* a key that this head alone uses and its query are scaled by ``sqrt(f)`` each, as in the Kimi K2 report;
* a query whose key other heads use too is scaled by ``f``, and the key is left alone. This is the report's
  rule for the rotary part of latent attention, and here that of grouped-query attention as well;
* values, gates and everything else are left alone.

So the logits of a head above the threshold are multiplied by exactly ``f``, and those of other heads by 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp

from hp_muon_plugin.errors import ConfigError

_NO_HEAD = 0


class Power(IntEnum):
    """To what a head's factor is applied: the row of the table of factors that is looked up."""

    none = 0
    root = 1
    whole = 2


@dataclass(frozen=True, slots=True)
class HeadRows:
    """The rows of one weight, in order.

    Attributes:
        module: The projection that owns the weight.
        heads: Head of each row, of those that this rank holds.
        powers: What each row is scaled by.
    """

    module: torch.nn.Module
    heads: tuple[int, ...]
    powers: tuple[Power, ...]


_Piece = tuple[int, int, Power]  # number of rows, head, power


def head_rows(attention: Any, name: str) -> list[HeadRows]:
    """The weights of one attention layer that QK-clip scales.

    Args:
        attention: megatron-core's SelfAttention or MLASelfAttention.
        name: Its name, for messages.

    Returns:
        One entry per weight.

    Raises:
        ConfigError: If scaling its projections does not scale its logits.
    """
    if hasattr(attention, "linear_qkv"):
        if _is_normalized(attention):
            raise refusal(f"{name} normalises queries and keys after their projection", "leave qk_layernorm off")
        return [_checked(attention.linear_qkv, _grouped(attention), name)]
    if hasattr(attention, "linear_kv_up_proj"):
        q = attention.linear_q_proj if hasattr(attention, "linear_q_proj") else attention.linear_q_up_proj
        return [
            _checked(q, _latent_queries(attention), name),
            _checked(attention.linear_kv_up_proj, _latent_keys(attention), name),
        ]
    raise refusal(f"{name} is a {type(attention).__name__}, whose projections are not known", "leave it null")


def refusal(why: str, fix: str) -> ConfigError:
    """Why QK-clip cannot be done.

    Args:
        why: The reason.
        fix: What helps.

    Returns:
        The error.
    """
    return ConfigError("optimizer.qk_clip", "...", why, f"{fix}, or set optimizer.qk_clip=null")


def _is_normalized(attention: Any) -> bool:
    norm = getattr(attention, "q_layernorm", None)
    return not (norm is None or isinstance(norm, IdentityOp)) or bool(getattr(attention.config, "qk_l2_norm", False))


def _grouped(attention: Any) -> list[_Piece]:
    """``[q.., (gate..,) k, v]`` group by group; see layout/fused.py."""
    heads, groups = attention.num_attention_heads_per_partition, attention.num_query_groups_per_partition
    size, per_group = attention.hidden_size_per_attention_head, heads // groups
    is_alone = per_group == 1
    pieces: list[_Piece] = []
    for group in range(groups):
        first = group * per_group
        pieces += [(size, first + head, Power.root if is_alone else Power.whole) for head in range(per_group)]
        if getattr(attention.config, "attention_output_gate", False):
            pieces.append((size * per_group, _NO_HEAD, Power.none))
        pieces.append((size, first, Power.root if is_alone else Power.none))
        pieces.append((size, _NO_HEAD, Power.none))
    return pieces


def _latent_queries(attention: Any) -> list[_Piece]:
    """Head by head, each the part that meets its own key and the one that meets the shared rotary key."""
    config = attention.config
    pieces: list[_Piece] = []
    for head in range(attention.num_attention_heads_per_partition):
        pieces += [(config.qk_head_dim, head, Power.root), (config.qk_pos_emb_head_dim, head, Power.whole)]
    return pieces


def _latent_keys(attention: Any) -> list[_Piece]:
    """Head by head ``[k, v]``."""
    config = attention.config
    pieces: list[_Piece] = []
    for head in range(attention.num_attention_heads_per_partition):
        pieces += [(config.qk_head_dim, head, Power.root), (config.v_head_dim, _NO_HEAD, Power.none)]
    return pieces


def _checked(module: torch.nn.Module, pieces: Sequence[_Piece], name: str) -> HeadRows:
    heads = tuple(head for count, head, _ in pieces for _ in range(count))
    powers = tuple(power for count, _, power in pieces for _ in range(count))
    weight, bias = module.weight, getattr(module, "bias", None)
    if bias is not None and bias.numel():
        raise refusal(f"a projection of {name} has a bias", "set add_qkv_bias=False")
    rows = whole_shape(weight)[0]
    if rows != len(heads):
        raise refusal(
            f"{name} has {rows} rows of queries, keys and values where {len(heads)} were expected",
            "split it over fewer tensor-parallel ranks",
        )
    if not weight.requires_grad:
        raise refusal(f"a projection of {name} is frozen", "train it")
    return HeadRows(module, heads, powers)


def whole_shape(weight: Any) -> torch.Size:
    """Shape of a weight before data-parallel ranks took their ranges.

    Args:
        weight: A parameter, or a shard of one.

    Returns:
        The shape of this tensor-parallel rank's part.
    """
    info = getattr(weight, "hp_shard", None)
    shape: torch.Size = weight.shape if info is None else info.shape
    return shape
