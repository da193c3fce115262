"""Which rows of a weight are one matrix, as megatron-core's forward reads them, and what Muon takes: typed by hand.

The oracle has this instead of the views and routes that it is there to check. That it is what forward reads:
``test_matrices_as_forward_reads.py``.
"""

import re

from hp_muon_plugin.config.trainer import Model

_ADAMW = re.compile(r"(embedding|output_layer|router|norm)\b|layernorm|bias")


def matrices_of(name: str, num_rows: int, model: Model) -> list[list[int]] | None:
    """Rows of each matrix.

    Args:
        name: Canonical name of the weight.
        num_rows: Its rows.
        model: The model it is of, with gated MLPs.

    Returns:
        One list for each; None if the weight is AdamW's.
    """
    if _ADAMW.search(name):
        return None
    module = name.split(".")[-2]
    if module == "linear_fc1":
        return [list(range(num_rows // 2)), list(range(num_rows // 2, num_rows))]
    if module == "linear_qkv":
        return _queries_keys_values(num_rows, model)
    if model.mla is not None and module == "linear_kv_down_proj":
        return [list(range(model.mla.kv_lora_rank)), list(range(model.mla.kv_lora_rank, num_rows))]
    if model.mla is not None and module == "linear_kv_up_proj":
        key, value = model.mla.qk_head_dim, model.mla.v_head_dim
        heads = range(0, num_rows, key + value)
        keys = [head + row for head in heads for row in range(key)]
        return [keys, [head + key + row for head in heads for row in range(value)]]
    assert module in ("linear_fc2", "linear_proj", "linear_q_down_proj", "linear_q_up_proj"), name
    return [list(range(num_rows))]


def _queries_keys_values(num_rows: int, model: Model) -> list[list[int]]:
    groups, heads = model.num_query_groups, model.num_attention_heads
    assert groups is not None
    queries, width = heads // groups, model.hidden_size // heads
    found: list[list[int]] = [[], [], []]
    row = 0
    for _ in range(groups):
        for kind, length in enumerate((queries * width, width, width)):
            found[kind] += range(row, row + length)
            row += length
    assert row == num_rows
    return found
