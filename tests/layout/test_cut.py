"""Where a cut falls in the matrices: checked element by element, on numbered parameters."""

import pytest
import torch

from hp_muon_plugin.layout import fused
from hp_muon_plugin.layout.cut import Cut, local_part_spec, local_view, whole_part_spec
from hp_muon_plugin.layout.spec import (
    AxisSplit,
    MatrixPart,
    MatrixView,
    ParamSpec,
    Role,
    plain_matrix,
    stacked_matrices,
)
from hp_muon_plugin.muon.matrix_view import local_slice, part_tensor

ROWS, COLS, NONE = Cut.rows, Cut.cols, Cut.none
CASES: dict[str, tuple[MatrixView, tuple[int, ...], int, int, list[Cut] | None]] = {
    "column": (plain_matrix(24, 16), (24, 16), 0, 4, [ROWS]),
    "row": (plain_matrix(16, 24), (16, 24), 1, 4, [COLS]),
    "gate and up": (fused.gated_view(24, 16), (2, 24, 16), 1, 3, [ROWS]),
    "gate and up in one": (fused.gated_view(24, 16, split=False), (2, 24, 16), 1, 3, [ROWS]),
    "qkv": (fused.qkv_view(12, 2, 2, 16), (96, 16), 0, 4, [ROWS] * 3),
    "a group is cut": (fused.qkv_view(1, 4, 4, 16), (24, 16), 0, 2, None),
    "heads": (fused.qkv_view(12, 2, 2, 16, per_head=True), (96, 16), 0, 4, [NONE]),
    "a head is cut": (fused.qkv_view(1, 1, 8, 16, per_head=True), (24, 16), 0, 6, None),
    "parts of heads": (fused.interleaved_heads_view(6, [("k", 3), ("v", 2)], 4), (30, 4), 0, 3, [ROWS] * 2),
    "parts of each head": (
        fused.interleaved_heads_view(6, [("k", 3), ("v", 2)], 4, per_head=True),
        (30, 4),
        0,
        3,
        [NONE] * 2,
    ),
    "stacked rows": (fused.stacked_rows_view([("latent", 6), ("rope", 2)], 4), (8, 4), 0, 2, None),
    "stacked rows, columns": (fused.stacked_rows_view([("latent", 6), ("rope", 2)], 4), (8, 4), 1, 2, [COLS] * 2),
    "experts": (stacked_matrices(8, 3, 5), (8, 3, 5), 0, 4, [NONE]),
    "inside experts": (stacked_matrices(2, 6, 5), (2, 6, 5), 1, 2, [ROWS]),
    "legacy experts": (fused.grouped_first_view(2, 4, 12, gated=True), (2, 4, 2, 6), 3, 3, [COLS]),
    "rows of two dims": (MatrixView((4, 6, 5), (MatrixPart("", (), (0, 1), (2,)),)), (24, 5), 0, 2, [ROWS]),
    "through two dims": (MatrixView((2, 6, 5), (MatrixPart("", (), (0, 1), (2,)),)), (12, 5), 0, 4, None),
}


@pytest.mark.parametrize("name", CASES)
def test_every_rank_finds_its_slices_of_the_matrices(name: str) -> None:
    view, factors, dim, size, wanted = CASES[name]
    numbered = torch.arange(torch.Size(factors).numel())
    spec = ParamSpec("w", Role.matrix, factors, view=view, split=AxisSplit("tp", size, factors, dim))
    assert spec.split is not None
    local = local_view(spec)
    if wanted is None:
        assert local is None
        return
    assert local is not None
    assert list(local.cuts) == wanted
    local.whole.check(numbered.numel())
    local.view.check(numbered.numel() // size)
    for place in range(size):
        own = local_slice(numbered, spec.split, place).reshape(-1)
        for index, cut in enumerate(local.cuts):
            part, whole_part = local.view.parts[index], view.parts[index]
            count, rows, cols = view.part_shape(whole_part)
            matrices = part_tensor(numbered, view, whole_part).reshape(count, rows, cols)
            mine = part_tensor(own, local.view, part).reshape(local.view.part_shape(part))
            held = mine.flatten().tolist()
            if cut is NONE:  # whole matrices, so all elements of those that it has any of
                touched = [m for m in matrices if m[0, 0] in held]
                assert [m.tolist() for m in touched] == mine.tolist()
            else:
                side = 1 if cut is ROWS else 2
                found = [
                    [int(matrices[i].flatten().tolist().index(e)) for e in m.flatten()] for i, m in enumerate(mine)
                ]
                lines = [sorted({e // cols if side == 1 else e % cols for e in each}) for each in found]
                assert all(len(each) == matrices.shape[side] // size for each in lines)
                chosen = matrices.index_select(side, torch.tensor(lines[0]))
                assert torch.equal(chosen, mine)  # the lines that it has, whole and in order
            whole_spec, local_spec = whole_part_spec(spec, local, index), local_part_spec(spec, local, index)
            assert whole_spec.split is not None
            apart = part_tensor(numbered, view, whole_part).reshape(whole_spec.shape)
            assert torch.equal(
                local_slice(apart.contiguous(), whole_spec.split, place).flatten(),
                part_tensor(own, local.view, part).flatten(),
            )
            assert whole_spec.local_numel == local_spec.numel == mine.numel()
