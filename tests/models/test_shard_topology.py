"""Shard groups in Megatron's order of ranks."""

import pytest

from hp_muon_plugin.config.data_parallel import HpFsdp
from hp_muon_plugin.config.trainer import Topology, Train
from hp_muon_plugin.models.shard_topology import shard_groups


@pytest.mark.parametrize("is_expert", [False, True])
@pytest.mark.parametrize(("tp", "pp", "ep", "replicas"), [(1, 1, 1, 1), (2, 2, 2, 1), (1, 2, 2, 2), (2, 1, 1, 4)])
def test_every_rank_is_in_one_group(tp: int, pp: int, ep: int, replicas: int, is_expert: bool) -> None:
    config = Train(topology=Topology(tp=tp, pp=pp, ep=ep), dp=HpFsdp(replicas=replicas))
    groups = list(shard_groups(config, 16, is_expert=is_expert))
    assert sorted(rank for group in groups for rank in group) == list(range(16))
    inner = ep if is_expert else tp
    assert {len(group) for group in groups} == {16 // pp // inner // replicas}
    assert all(b - a == inner for group in groups for a, b in zip(group, group[1:], strict=False))


def test_known_groups() -> None:
    config = Train(topology=Topology(tp=2, pp=2), dp=HpFsdp(replicas=2))
    assert list(shard_groups(config, 16, is_expert=False)) == [
        [0, 2], [4, 6], [1, 3], [5, 7], [8, 10], [12, 14], [9, 11], [13, 15],
    ]  # fmt: skip
    assert list(shard_groups(config, 16, is_expert=False, between_replicas=True)) == [
        [0, 4], [2, 6], [1, 5], [3, 7], [8, 12], [10, 14], [9, 13], [11, 15],
    ]  # fmt: skip
