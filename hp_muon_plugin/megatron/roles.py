"""Roles of Megatron's parameters, from the names that megatron-core gives them.

Checked against 0.12.1, 0.16.1 and 0.19.2 (reference/megatron.md, section 6, has the dumps).
"""

import re

from hp_muon_plugin.layout.spec import Role

_RULES: tuple[tuple[str, Role], ...] = (
    (r"(word|position|tokentype)_embeddings\.weight$", Role.embedding),
    (r"(^|\.)output_layer\.weight$", Role.output),
    (r"\.router\.weight$", Role.router),
    (r"(^|[._])bias$", Role.bias),
    (r"expert_bias$", Role.bias),
    (r"norm\w*(\.norm)?\.weight$", Role.norm),
    (r"layer_norm_(weight|bias)$", Role.norm),
    (r"\.conv1d\.weight$", Role.conv),
    (r"\.mixer\.in_proj\.weight$", Role.fused_unknown),
    (r"\.in_proj\.weight$", Role.fused_unknown),
    (r"\.linear_qkv\.weight$", Role.attention_qkv),
    (r"\.(linear_q|linear_q_proj|linear_kv)\.weight$", Role.attention_qkv),
    (r"attention\.linear_proj\.weight$", Role.attention_output),
    (r"\.linear_(q|kv|qkv)_(down|up)_proj\.weight$", Role.latent_projection),
    (r"\.experts\.local_experts\.\d+\.linear_fc1\.weight$", Role.expert_first),
    (r"\.experts\.local_experts\.\d+\.linear_fc2\.weight$", Role.expert_second),
    (r"\.experts\.linear_fc1\.weight\d*$", Role.expert_first),
    (r"\.experts\.linear_fc2\.weight\d*$", Role.expert_second),
    (r"\.experts\.weight1$", Role.expert_first),
    (r"\.experts\.weight2$", Role.expert_second),
    (r"\.shared_experts\.gate_weight$", Role.router),
    (r"\.linear_fc1\.weight$", Role.mlp_first),
    (r"\.linear_fc2\.weight$", Role.mlp_second),
)
_COMPILED = tuple((re.compile(pattern), role) for pattern, role in _RULES)


def megatron_role(name: str, shape: tuple[int, ...], *, is_embedding_or_output: bool = False) -> Role:
    """The role of one parameter.

    Args:
        name: Its name inside the model, without wrapper prefixes.
        shape: Its shape on this rank.
        is_embedding_or_output: megatron-core's own mark on the parameter.

    Returns:
        The role. A two-dimensional weight that no rule knows is a plain matrix.
    """
    for pattern, role in _COMPILED:
        if pattern.search(name):
            return role
    if is_embedding_or_output:
        return Role.embedding
    if len(shape) < 2:
        return Role.vector
    return Role.matrix if len(shape) == 2 else Role.conv
