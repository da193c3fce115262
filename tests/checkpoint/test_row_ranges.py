"""What a rank holds of a tensor, as boxes: each element of the whole exactly once over all ranks, in its place."""

import math
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from hp_muon_plugin.checkpoint.ranges import chunks_of_range, held_chunks
from hp_muon_plugin.layout.spec import AxisSplit
from hp_muon_plugin.muon.matrix_view import local_slice

SPLITS = [
    ((12,), None),
    ((6, 4), None),
    ((), None),
    ((3, 4, 5), None),
    ((8, 6), AxisSplit("tp", 2, (8, 6), 0)),
    ((8, 6), AxisSplit("tp", 3, (8, 6), 1)),
    ((12, 5), AxisSplit("tp", 3, (2, 6, 5), 1)),  # gated: gate and up are cut each
    ((12,), AxisSplit("tp", 2, (2, 6), 1)),
    ((4, 6, 5), AxisSplit("etp", 2, (4, 6, 5), 1)),
    ((4, 30), AxisSplit("tp", 2, (4, 3, 10), 2)),  # a cut inside a row that is no dim of the shape
]


@given(st.sampled_from(SPLITS), st.lists(st.floats(0, 1), max_size=4))
def test_ranges_of_all_ranks_put_the_whole_together(case: tuple, places: list[float]) -> None:
    shape, split = case
    whole = torch.arange(math.prod(shape)).view(shape)
    seen = torch.full(shape, -1)
    for index in range(split.size if split else 1):
        local = (whole if split is None else local_slice(whole, split, index)).reshape(-1)
        cuts = sorted({0, local.numel(), *(int(place * local.numel()) for place in places)})
        for start, stop in pairwise(cuts):
            count = 0
            for chunk in held_chunks(shape, split, index, start, stop):
                size = math.prod(chunk.sizes)
                count += size
                box = tuple(slice(first, first + n) for first, n in zip(chunk.offsets, chunk.sizes, strict=True))
                assert bool((seen[box] == -1).all()), "an element is held twice"
                seen[box] = local[chunk.first : chunk.first + size].view(chunk.sizes)
            assert count == stop - start
    assert torch.equal(seen, whole)


def test_a_range_of_a_matrix_is_three_boxes_at_most() -> None:
    for start in range(20):
        for stop in range(start + 1, 21):
            assert len(list(chunks_of_range((4, 5), start, stop))) <= 3
