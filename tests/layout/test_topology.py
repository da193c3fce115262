"""Supernodes: where the knowledge comes from, and what crossing them costs."""

import json
from fractions import Fraction

import pytest

from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.layout.topology import Crossing, Topology, discover, own_label

MIB = 2**20


def labelled(labels):
    return Topology.from_labels(labels, source="the test")


def test_uniform_counts_consecutive_ranks():
    assert Topology.uniform(5, 2).supernode_of == (0, 0, 1, 1, 2)


@pytest.mark.parametrize("size", [0, -1])
def test_supernode_without_ranks_is_refused(size):
    with pytest.raises(ConfigError, match=f"topology.ranks_per_supernode={size}"):
        Topology.uniform(4, size)


def test_labels_are_numbered_by_first_appearance():
    assert labelled(["b", "b", "a", "b"]).supernode_of == (0, 0, 1, 0)


def test_supernodes_of_a_group():
    topology = Topology.uniform(8, 2)
    assert topology.supernodes([7, 0, 1]) == (0, 3)
    assert topology.supernodes([4, 5]) == (2,)


# Crossing: the formulas against messages counted one by one


def counted_ring(places, numel):
    """Elements that the busiest rank sends to another supernode in a ring all-gather."""
    size, shard = len(places), Fraction(numel, len(places))
    sent = [0] * size
    for rank in range(size):
        for _ in range(size - 1):  # each step passes one shard on
            sent[rank] += shard * (places[rank] != places[(rank + 1) % size])
    return max(sent)


def counted_flat(places, numel):
    shard = Fraction(numel, len(places))
    return max(sum(shard for theirs in places if theirs != mine) for mine in places)


def counted_least(places, numel):
    shard = Fraction(numel, len(places))
    return max(
        sum(shard for theirs in places if theirs != supernode) / places.count(supernode) for supernode in set(places)
    )


@pytest.mark.parametrize(
    "places", [[0, 1], [0, 0, 1], [0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1], [0, 1, 2], [2, 2, 0, 1, 1, 1]]
)
def test_crossing_is_what_the_messages_add_up_to(places):
    numel = 360  # divides by all of the sizes above, and by their shares
    cost = labelled(places).crossing(range(len(places)), numel)
    assert cost.ring_bytes == counted_ring(places, numel)
    assert cost.flat_bytes == counted_flat(places, numel)
    assert cost.least_bytes == counted_least(places, numel)


@pytest.mark.parametrize("ranks", [[0], [0, 1], [2, 3]])
def test_group_inside_a_supernode_crosses_nothing(ranks):
    assert Topology.uniform(4, 2).crossing(ranks, MIB) == Crossing(0, 0, 0)


# The check


def test_group_inside_a_supernode_passes():
    assert Topology.uniform(8, 4).check_shard_group("fsdp.shard_size", [4, 5, 6, 7], MIB) is None


def test_message_names_option_cost_and_fix():
    error = Topology.uniform(8, 4).check_shard_group("fsdp.shard_size", range(8), 8 * 2**30)
    assert isinstance(error, ConfigError)
    text = str(error)
    assert text.startswith("fsdp.shard_size=8: ")
    assert "covers 2 supernodes (known from topology.ranks_per_supernode=4)" in text
    assert f"{7 * 2**30} bytes (7.00 GiB) between them in a ring" in text
    assert f"{4 * 2**30} bytes (4.00 GiB) directly" in text
    assert f"at least {2**30} bytes (1.00 GiB)" in text
    assert "fix: shard over 4 ranks and replicate over 2; if these ranks share a supernode" in text


@pytest.mark.parametrize(
    ("places", "inside"),
    [([0, 0, 0, 0], 4), ([0, 0, 1, 1], 2), ([0, 0, 0, 1], 1), ([0, 1, 0, 1], 1), ([0, 0, 0, 1, 1, 1], 3)],
)
def test_largest_shard_size_is_a_divisor_whose_blocks_stay_inside(places, inside):
    assert labelled(places).largest_shard_size(range(len(places))) == inside


def test_interleaved_group_is_told_to_order_its_ranks():
    error = labelled([0, 1, 0, 1]).check_shard_group("fsdp.shard_size", range(4), MIB)
    assert "next to each other" in error.fix
    assert labelled([0, 1, 0, 1]).check_shard_group("fsdp.shard_size", [0, 2], MIB) is None


def test_supernodes_in_pieces_are_found():
    error = labelled(["a", "b", "a"]).check_contiguous()
    assert "supernode 0 holds ranks [0, 2]" in error.why
    assert labelled(["b", "b", "a"]).check_contiguous() is None


# Discovery


def rank_table(**changes):
    """Two supernodes: of nodes 0 and 1, and of node 2; two ranks on each node."""
    nodes = [
        {
            "server_id": f"node_{node}",
            "device": [{"device_id": str(d), "super_device_id": str(d), "rank_id": str(2 * node + d)} for d in (0, 1)],
        }
        for node in (2, 0, 1)  # servers come in any order
    ]
    pods = [
        {"super_pod_id": "b", "server_list": [{"server_id": "node_2"}]},
        {"super_pod_id": "a", "server_list": [{"server_id": "node_0"}, {"server_id": "node_1"}]},
    ]
    table = {"version": "1.2", "status": "completed", "server_list": nodes, "super_pod_list": pods}
    return {key: value for key, value in (table | changes).items() if value is not None}


def discovered(tmp_path, table, world_size=6):
    path = tmp_path / "ranks.json"
    path.write_text(table if isinstance(table, str) else json.dumps(table))
    return discover(world_size, {"RANK_TABLE_FILE": str(path)})


def test_rank_table_gives_supernodes(tmp_path):
    topology = discovered(tmp_path, rank_table())
    assert topology.supernode_of == (0, 0, 0, 0, 1, 1)
    assert topology.source == "RANK_TABLE_FILE"


def test_rank_table_without_super_pods_gives_servers(tmp_path):
    table = rank_table(super_pod_list=None, version="1.0")
    assert discovered(tmp_path, table).supernode_of == (0, 0, 1, 1, 2, 2)


POD = {"super_pod_id": "a", "server_list": [{"server_id": f"node_{node}"} for node in range(3)]}


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ("{", "cannot be read"),
        ("[]", "is not a JSON object"),
        (rank_table(status="initializing"), "has status 'initializing'"),
        (rank_table(server_list=None), "no list of objects under 'server_list'"),
        (rank_table(server_list=["node_0"]), "no list of objects under 'server_list'"),
        (rank_table(super_pod_list=[]), "in no super pod"),
        (rank_table(super_pod_list=[POD, POD]), "lists server 'node_0' in two super pods"),
        (rank_table(super_pod_list=[{"server_list": POD["server_list"]}]), "lacks 'super_pod_id'"),
        (rank_table(server_list=[{"server_id": "node_0", "device": [{"rank_id": "x"}]}]), "rank_id 'x'"),
        (rank_table(server_list=[{"server_id": "node_0", "device": [{"rank_id": "0"}] * 2}]), "rank_id '0' twice"),
        (rank_table(server_list=[{"server_id": "node_0", "device": [{"rank_id": "0"}]}]), "describes 1 ranks"),
    ],
)
def test_damaged_rank_table_is_refused(tmp_path, table, why):
    with pytest.raises(ConfigError, match=why) as caught:
        discovered(tmp_path, table)
    assert caught.value.option == "RANK_TABLE_FILE"


def test_missing_rank_table_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        discover(2, {"RANK_TABLE_FILE": str(tmp_path / "none.json")})


def test_rank_table_of_another_job_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="describes 6 ranks, and the job has ranks 0 to 7"):
        discovered(tmp_path, rank_table(), world_size=8)


def test_option_comes_before_everything():
    environ = {"RANK_TABLE_FILE": "missing.json", "LOCAL_WORLD_SIZE": "2"}
    assert discover(4, environ, ranks_per_supernode=3).supernode_of == (0, 0, 0, 1)


def test_node_stands_for_a_supernode():
    topology = discover(4, {"LOCAL_WORLD_SIZE": "2", "RANK": "3", "GROUP_RANK": "1"})
    assert topology.supernode_of == (0, 0, 1, 1)
    assert "LOCAL_WORLD_SIZE=2" in topology.source


def test_nodes_of_unequal_sizes_are_refused():
    with pytest.raises(ConfigError, match="rank 3 is on node 2"):
        discover(6, {"LOCAL_WORLD_SIZE": "2", "RANK": "3", "GROUP_RANK": "2"})


@pytest.mark.parametrize("text", ["0", "-1", "two", ""])
def test_local_world_size_that_is_no_number_is_refused(text):
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE"):
        discover(4, {"LOCAL_WORLD_SIZE": text})


def test_nothing_known_is_one_supernode_and_says_so():
    topology = discover(3, {})
    assert topology.supernode_of == (0, 0, 0)
    assert topology.source.startswith("nothing")


@pytest.mark.parametrize(
    ("environ", "label"),
    [
        ({"HCCL_LOGIC_SUPERPOD_ID": "7", "GROUP_RANK": "1"}, "supernode 7"),
        ({"HCCL_LOGIC_SUPERPOD_ID": "", "GROUP_RANK": "1"}, "node 1"),
        ({}, "host h"),
    ],
)
def test_own_label_prefers_what_hccl_is_told(environ, label):
    assert own_label(environ, "h") == label
