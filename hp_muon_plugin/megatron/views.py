"""How megatron-core's weights read as matrices, and how tensor-parallel ranks cut them.

What the rows of a weight mean is told by its name and by the TransformerConfig of its module, never
by its shape alone. Nothing here imports torch or megatron, so that plans need neither.
"""

from typing import Any

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.layout import fused
from hp_muon_plugin.layout.spec import MatrixPart, MatrixView, Role, plain_matrix


def matrix_view(name: str, config: Any, role: Role, whole: tuple[int, ...], options: HpMuon) -> MatrixView | None:
    """The matrices of one parameter.

    Args:
        name: Name of the parameter, with or without prefixes.
        config: The TransformerConfig of its module, or anything with the same attributes.
        role: Its role.
        whole: Shape over all tensor-parallel ranks.
        options: Which fused weights are split.

    Returns:
        The view, or None for what is not two-dimensional.
    """
    if len(whole) != 2:
        return None
    rows, cols = whole
    if role in (Role.mlp_first, Role.expert_first) and config.gated_linear_unit:
        return fused.gated_view(rows // 2, cols, split=options.split_gate_up)
    if role is Role.attention_qkv:
        return _attention_view(name, config, rows, cols, options)
    if role is Role.attention_output and options.per_head:
        return _output_view(config, rows, cols)
    if role is Role.latent_projection:
        return _latent_view(name, config, rows, cols, options)
    return plain_matrix(rows, cols)


def tensor_parallel_cut(role: Role, whole: tuple[int, ...], dim: int, *, is_gated: bool) -> tuple[tuple[int, ...], int]:
    """In which shape, and along which dim of it, ranks hold contiguous parts.

    Args:
        role: The parameter's role.
        whole: Shape over all ranks.
        dim: megatron-core's ``partition_dim``.
        is_gated: Whether first MLP layers hold gate and up.

    Returns:
        Factored shape and dim. A gated first layer is ``[gate_r; up_r]`` on each rank, so its cut
        runs through both halves.
    """
    if role in (Role.mlp_first, Role.expert_first) and is_gated and dim == 0:
        return (2, whole[0] // 2, *whole[1:]), 1
    return whole, dim


def _attention_view(name: str, config: Any, rows: int, cols: int, options: HpMuon) -> MatrixView:
    heads, groups, size = config.num_attention_heads, config.num_query_groups or 0, config.kv_channels
    if name.endswith("linear_qkv.weight"):
        has_gate = bool(getattr(config, "attention_output_gate", False))
        return fused.qkv_view(
            groups,
            heads // groups,
            size,
            cols,
            has_gate=has_gate,
            split=options.split_qkv,
            per_head=options.per_head,
        )
    if name.endswith("linear_kv.weight"):
        pieces = [("k", size), ("v", size)]
        return fused.interleaved_heads_view(
            rows // (2 * size), pieces, cols, split=options.split_qkv, per_head=options.per_head
        )
    per_head = rows // heads if rows % heads == 0 else rows
    if options.per_head and rows % heads == 0:
        return fused.interleaved_heads_view(heads, [("q", per_head)], cols, per_head=True)
    return plain_matrix(rows, cols)


def _output_view(config: Any, rows: int, cols: int) -> MatrixView:
    """Per head, the output projection reads as one ``(rows, head)`` block of columns per head."""
    heads = config.num_attention_heads
    if cols % heads:
        return plain_matrix(rows, cols)
    return MatrixView((rows, heads, cols // heads), (MatrixPart("head", (1,), (0,), (2,)),))


def _latent_view(name: str, config: Any, rows: int, cols: int, options: HpMuon) -> MatrixView:
    heads = config.num_attention_heads
    pieces = down_projection_pieces(name, config)
    if pieces is not None:
        return fused.stacked_rows_view(pieces, cols, split=options.split_qkv)
    if name.endswith("linear_kv_up_proj.weight"):
        pieces = [("k", config.qk_head_dim), ("v", config.v_head_dim)]
        return fused.interleaved_heads_view(heads, pieces, cols, split=options.split_qkv, per_head=options.per_head)
    if name.endswith("linear_q_up_proj.weight") and options.per_head:
        return fused.interleaved_heads_view(heads, [("q", rows // heads)], cols, per_head=True)
    return plain_matrix(rows, cols)


def down_projection_pieces(name: str, config: Any) -> list[tuple[str, int]] | None:
    """Blocks of rows of an MLA down projection, over all ranks.

    Args:
        name: Name of a latent projection.
        config: The TransformerConfig of its module.

    Returns:
        Label and rows of each block, or None if it is no down projection.
    """
    joint = [("latent", config.kv_lora_rank), ("rotary", config.qk_pos_emb_head_dim)]
    if name.endswith("linear_q_down_proj.weight"):
        return [("q", config.q_lora_rank)]
    if name.endswith("linear_kv_down_proj.weight"):
        return joint
    if name.endswith("linear_qkv_down_proj.weight"):  # the two down projections fused into one
        return [("q", config.q_lora_rank), *joint]
    return None
