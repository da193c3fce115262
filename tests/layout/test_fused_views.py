"""Every fused weight: the view covers each element once and equals separately stored matrices."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hp_muon_plugin.layout import fused
from hp_muon_plugin.layout.spec import MatrixView, plain_matrix, stacked_matrices
from hp_muon_plugin.muon.matrix_view import as_matrices, part_tensor, slot_like

G, Q, D, N = 2, 3, 4, 5  # groups, queries per group, head size, columns


def numbered(*shape: int) -> torch.Tensor:
    numel = 1
    for size in shape:
        numel *= size
    return torch.arange(numel, dtype=torch.float32).view(shape)


def matrices(tensor: torch.Tensor, view: MatrixView) -> list[torch.Tensor]:
    view.check(tensor.numel())
    found = []
    for part in view.parts:
        found += list(part_tensor(tensor, view, part).reshape(view.part_shape(part)))
    return found


def same(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(got) == len(wanted)
    for left, right in zip(got, wanted, strict=True):
        assert torch.equal(left, right), (left, right)


def test_qkv_is_interleaved_by_query_group() -> None:
    heads = {
        f"{kind}{i}": numbered(D, N) + 100 * n
        for n, (kind, i) in enumerate(
            [("q", 0), ("q", 1), ("q", 2), ("k", 0), ("v", 0), ("q", 3), ("q", 4), ("q", 5), ("k", 1), ("v", 1)]
        )
    }
    order = ["q0", "q1", "q2", "k0", "v0", "q3", "q4", "q5", "k1", "v1"]
    weight = torch.cat([heads[name] for name in order])
    q = torch.cat([heads[f"q{i}"] for i in range(6)])
    k, v = (torch.cat([heads[f"{kind}0"], heads[f"{kind}1"]]) for kind in "kv")
    same(matrices(weight, fused.qkv_view(G, Q, D, N)), [q, k, v])
    same(matrices(weight, fused.qkv_view(G, Q, D, N, per_head=True)), [heads[name] for name in order])
    same(matrices(weight, fused.qkv_view(G, Q, D, N, split=False)), [weight])


def test_qkv_with_output_gate_has_four_parts() -> None:
    weight = numbered(G * (2 * Q + 2) * D, N)
    view = fused.qkv_view(G, Q, D, N, has_gate=True)
    groups = weight.view(G, 2 * Q + 2, D, N)
    wanted = [groups[:, :Q], groups[:, Q : 2 * Q], groups[:, 2 * Q : 2 * Q + 1], groups[:, 2 * Q + 1 :]]
    same(matrices(weight, view), [piece.reshape(-1, N) for piece in wanted])


def test_gate_and_up_are_two_matrices() -> None:
    gate, up = numbered(6, N), numbered(6, N) + 50
    same(matrices(torch.cat([gate, up]), fused.gated_view(6, N)), [gate, up])


def test_latent_up_projection_is_interleaved_by_head() -> None:
    weight = numbered(3 * 7, N)
    heads = weight.view(3, 7, N)
    view = fused.interleaved_heads_view(3, [("k", 4), ("v", 3)], N)
    same(matrices(weight, view), [heads[:, :4].reshape(-1, N), heads[:, 4:].reshape(-1, N)])
    per_head = fused.interleaved_heads_view(3, [("k", 4), ("v", 3)], N, per_head=True)
    same(matrices(weight, per_head), [h[:4] for h in heads] + [h[4:] for h in heads])


def test_latent_down_projection_is_blocks_of_rows() -> None:
    weight = numbered(9, N)
    same(matrices(weight, fused.stacked_rows_view([("latent", 6), ("rotary", 3)], N)), [weight[:6], weight[6:]])


@pytest.mark.parametrize("gated", [True, False])
def test_legacy_grouped_experts_are_per_expert(gated: bool) -> None:
    """Declared [hidden, E*ffn], stored [E, hidden, ffn]: megatron-core 0.16 orthogonalises it as one matrix."""
    experts, hidden, ffn = 3, 4, 6
    stored = numbered(experts, hidden, ffn)
    first = matrices(stored.view(hidden, experts * ffn), fused.grouped_first_view(experts, hidden, ffn, gated=gated))
    wanted = [half for expert in stored for half in (expert.split(3, dim=1) if gated else [expert])]
    same(first, wanted)
    second = numbered(experts, ffn, hidden)
    view = fused.grouped_second_view(experts, ffn, hidden)
    same(matrices(second.view(experts * ffn, hidden), view), list(second))


def test_stacked_rows_with_declared_experts_equal_three_dims() -> None:
    """KellerJordan #65: [E*M, N] with a declared M reads as [E, M, N]."""
    stored = numbered(4, 8, 16)
    same(matrices(stored.view(32, 16), stacked_matrices(4, 8, 16)), list(stored))


@pytest.mark.parametrize(
    ("view", "numel"),
    [
        (stacked_matrices(4, 8, 16), 512),
        (fused.qkv_view(G, Q, D, N, per_head=True), G * (Q + 2) * D * N),
        (fused.gated_view(6, N), 60),
        (plain_matrix(3, 4), 12),
    ],
)
def test_views_without_a_copy_where_strides_allow(view: MatrixView, numel: int) -> None:
    tensor = numbered(numel)
    for part in view.parts:
        found = as_matrices(tensor, view, part)
        assert found is not None
        assert found.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def test_interleaved_rows_have_no_plain_view() -> None:
    view = fused.qkv_view(G, Q, D, N)
    assert as_matrices(numbered(G * (Q + 2) * D * N), view, view.parts[0]) is None


@given(
    groups=st.integers(1, 3), queries=st.integers(1, 3), size=st.integers(1, 4), cols=st.integers(1, 6),
    gate=st.booleans(), split=st.booleans(), per_head=st.booleans(),
)  # fmt: skip
def test_a_slot_lines_up_with_its_part(
    groups: int, queries: int, size: int, cols: int, gate: bool, split: bool, per_head: bool
) -> None:
    """Writing a parameter into batch slots and back gives the parameter."""
    view = fused.qkv_view(groups, queries, size, cols, has_gate=gate, split=split, per_head=per_head)
    tensor = numbered(groups * (queries * (2 if gate else 1) + 2) * size, cols)
    back = torch.full_like(tensor, -1)
    for part in view.parts:
        count, rows, columns = view.part_shape(part)
        slot = torch.empty(count, rows, columns)
        slot_like(slot, view, part).copy_(part_tensor(tensor, view, part))
        wanted = part_tensor(tensor, view, part).reshape(count, rows, columns)
        assert torch.equal(slot, wanted)
        part_tensor(back, view, part).copy_(slot_like(slot, view, part))
    assert torch.equal(back, tensor)
