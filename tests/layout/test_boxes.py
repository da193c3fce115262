"""Ranges of elements as boxes."""

import math

import numpy
from hypothesis import given
from hypothesis import strategies as st

from hp_muon_plugin.layout.boxes import boxes


@given(st.lists(st.integers(0, 5), max_size=4), st.data())
def test_boxes_are_the_range_in_order(shape: list[int], data: st.DataObject) -> None:
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    array = numpy.arange(count).reshape(shape)
    found = boxes(tuple(shape), start, stop)
    parts = [
        array[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))].reshape(-1) for box in found
    ]
    assert numpy.concatenate([*parts, []]).tolist() == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_whole_rows_are_one_box() -> None:
    assert boxes((6, 4), 4, 16) == [((1, 0), (3, 4))]
    assert boxes((6, 4), 3, 18) == [((0, 3), (1, 1)), ((1, 0), (3, 4)), ((4, 0), (1, 2))]
