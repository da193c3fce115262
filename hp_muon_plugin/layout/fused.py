"""Matrix views of weights that hold several matrices: fused QKV, gate/up, latent projections, experts.

Every function states the order in which the parameter stores its elements. The orders of
megatron-core's fused weights were read from its source in all three tested versions.
"""

from hp_muon_plugin.layout.spec import MatrixPart, MatrixView, plain_matrix, stacked_matrices


def qkv_view(
    groups: int,
    queries_per_group: int,
    head_dim: int,
    cols: int,
    *,
    has_gate: bool = False,
    split: bool = True,
    per_head: bool = False,
) -> MatrixView:
    """``[groups * (queries + 2) * head_dim, cols]``, stored group by group as ``[q.., k, v]``.

    With ``has_gate`` (megatron-core's attention output gate) a group is ``[q.., gate.., k, v]``.

    Args:
        groups: Query groups of the whole model, that is key and value heads.
        queries_per_group: Query heads per group.
        head_dim: Size of a head.
        cols: Input size.
        has_gate: Whether as many gate heads as query heads stand between q and k.
        split: Separate matrices for q, (gate,) k and v; otherwise one fused matrix.
        per_head: One matrix per head instead.

    Returns:
        The view.
    """
    heads = queries_per_group * (2 if has_gate else 1) + 2
    if per_head:
        return stacked_matrices(groups * heads, head_dim, cols, label="head")
    if not split:
        return plain_matrix(groups * heads * head_dim, cols)
    lengths = [("q", queries_per_group)]
    if has_gate:
        lengths.append(("gate", queries_per_group))
    lengths += [("k", 1), ("v", 1)]
    return MatrixView((groups, heads, head_dim, cols), _slices(lengths, dim=1, batch=(), rows=(0, 1, 2), cols=(3,)))


def gated_view(ffn: int, cols: int, *, split: bool = True) -> MatrixView:
    """``[2 * ffn, cols]``, stored as ``[gate; up]``.

    Args:
        ffn: Rows of gate and of up.
        cols: Input size.
        split: Separate matrices for gate and up; otherwise one.

    Returns:
        The view.
    """
    if not split:
        return plain_matrix(2 * ffn, cols)
    return stacked_matrices(2, ffn, cols, label="gate/up")


def interleaved_heads_view(
    heads: int, lengths: list[tuple[str, int]], cols: int, *, split: bool = True, per_head: bool = False
) -> MatrixView:
    """``[heads * sum(lengths), cols]``, stored head by head, each head as its labelled pieces.

    This is MLA's ``linear_kv_up_proj``: per head ``[k, v]``.

    Args:
        heads: Heads of the whole model.
        lengths: Label and rows of each piece of a head.
        cols: Input size.
        split: Separate matrices for the pieces, each over all heads; otherwise one.
        per_head: One matrix per head and piece instead.

    Returns:
        The view.
    """
    total = sum(length for _, length in lengths)
    if not split and not per_head:
        return plain_matrix(heads * total, cols)
    if per_head:
        if not split or len(lengths) == 1:
            return stacked_matrices(heads, total, cols, label="head")
        return MatrixView((heads, total, cols), _slices(lengths, dim=1, batch=(0,), rows=(1,), cols=(2,)))
    return MatrixView((heads, total, cols), _slices(lengths, dim=1, batch=(), rows=(0, 1), cols=(2,)))


def stacked_rows_view(lengths: list[tuple[str, int]], cols: int, *, split: bool = True) -> MatrixView:
    """``[sum(lengths), cols]``, stored as labelled blocks of rows one below another.

    This is MLA's ``linear_kv_down_proj``: ``[latent; rotary key]``.

    Args:
        lengths: Label and rows of each block.
        cols: Input size.
        split: Separate matrices for the blocks; otherwise one.

    Returns:
        The view.
    """
    total = sum(length for _, length in lengths)
    if not split:
        return plain_matrix(total, cols)
    return MatrixView((total, cols), _slices(lengths, dim=0, batch=(), rows=(0,), cols=(1,)))


def grouped_first_view(experts: int, hidden: int, ffn: int, *, gated: bool, split: bool = True) -> MatrixView:
    """Legacy grouped experts' ``weight1``: stored as ``[experts, hidden, ffn]``, shown as 2-D.

    megatron-core declares it ``[hidden, experts * ffn]`` and reads it as ``view(experts, hidden, -1)``,
    so the declared shape says nothing about the order. It is transposed: input size first.

    Args:
        experts: Experts on this rank.
        hidden: Input size.
        ffn: Output size of one expert, gate and up together when gated.
        gated: Whether the last dim is ``[gate, up]``.
        split: Separate matrices for gate and up.

    Returns:
        The view.
    """
    if gated and split:
        part = MatrixPart("gate/up", (0, 2), (1,), (3,))
        return MatrixView((experts, hidden, 2, ffn // 2), (part,))
    return stacked_matrices(experts, hidden, ffn)


def grouped_second_view(experts: int, ffn: int, hidden: int) -> MatrixView:
    """Legacy grouped experts' ``weight2``: ``[experts * ffn, hidden]``, read as ``view(experts, -1, hidden)``.

    Args:
        experts: Experts on this rank.
        ffn: Input size of one expert.
        hidden: Output size.

    Returns:
        The view.
    """
    return stacked_matrices(experts, ffn, hidden)


def _slices(
    lengths: list[tuple[str, int]],
    *,
    dim: int,
    batch: tuple[int, ...],
    rows: tuple[int, ...],
    cols: tuple[int, ...],
) -> tuple[MatrixPart, ...]:
    parts, start = [], 0
    for label, length in lengths:
        parts.append(MatrixPart(label, batch, rows, cols, (dim, start, length)))
        start += length
    return tuple(parts)
