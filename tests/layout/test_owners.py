"""Who updates what: even on every link between replicas, in few stretches."""

from hp_muon_plugin.layout.owners import Balance


def owned(parts: list[dict[int, int]], owners: list[int], shard: int, owner: int) -> int:
    return sum(part.get(shard, 0) for part, who in zip(parts, owners, strict=True) if who == owner)


def test_equal_parameters_keep_the_order_of_the_buffer() -> None:
    parts = [{0: 64} for _ in range(8)]
    assert Balance(2, 1).divide(parts, [0] * 4 + [1] * 4) == [0] * 4 + [1] * 4


def test_later_groups_make_up_for_a_parameter_that_fills_a_shard() -> None:
    """An embedding on one shard and a head on the other had one owner: their link was idle in one direction."""
    balance = Balance(2, 2)
    groups = [[{0: 300}, {1: 300}]] + [[{0: 60}, {0: 40}, {1: 50}, {1: 50}] for _ in range(6)]
    owners = [balance.divide(parts, [0] * (len(parts) // 2) + [1] * (len(parts) // 2)) for parts in groups]
    assert owners[0] in ([0, 1], [1, 0])
    parts, flat = sum(groups, []), sum(owners, [])
    for shard in (0, 1):
        assert abs(owned(parts, flat, shard, 0) - owned(parts, flat, shard, 1)) <= 20


def test_small_parameters_follow_their_neighbours() -> None:
    """Each change of owner in the buffer is one more collective."""
    parts = [{0: 1000}, {0: 3}, {0: 1000}, {0: 5}]
    assert Balance(2, 1).divide(parts, [0, 0, 1, 1]) == [0, 0, 1, 1]


def test_more_replicas_than_parameters() -> None:
    assert Balance(4, 1).divide([{0: 7}], [0]) == [0]
    assert Balance(4, 1).divide([], []) == []
