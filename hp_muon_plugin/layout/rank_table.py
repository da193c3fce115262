"""Ascend's rank table: which rank sits in which supernode.

The format is that of HCCL's ``RANK_TABLE_FILE``, version 1.2 (with ``super_pod_list``) or 1.0 (without;
then a server is the largest unit that the file knows)::

    {"version": "1.2", "status": "completed",
     "server_list": [{"server_id": "node_0", "device": [{"device_id": "0", "rank_id": "0"}]}],
     "super_pod_list": [{"super_pod_id": "0", "server_list": [{"server_id": "node_0"}]}]}
"""

import json
from collections.abc import Iterator
from pathlib import Path

from hp_muon_plugin.errors import ConfigError

OPTION = "RANK_TABLE_FILE"


def read_rank_table(path: str, world_size: int) -> list[str]:
    """Read the supernode of every rank.

    Args:
        path: The file.
        world_size: Ranks of the job.

    Returns:
        One supernode name for each rank.

    Raises:
        ConfigError: If the file is missing, unfinished, damaged, or of another job size.
    """
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _error(path, f"cannot be read ({error})") from error
    if not isinstance(table, dict):
        raise _error(path, "is not a JSON object")
    if table.get("status", "completed") != "completed":
        raise _error(path, f"has status {table['status']!r}, not 'completed'")
    knows_pods = "super_pod_list" in table
    pods = dict(_supernodes(table, path)) if knows_pods else {}
    names: dict[int, str] = {}
    for server in _objects(table, "server_list", path):
        server_id = _text(server, "server_id", path)
        if knows_pods and server_id not in pods:
            raise _error(path, f"lists server {server_id!r} in no super pod")
        for device in _objects(server, "device", path):
            rank = _text(device, "rank_id", path)
            if not rank.isdecimal() or int(rank) in names:
                raise _error(path, f"has rank_id {rank!r} twice, or it is no number")
            names[int(rank)] = pods.get(server_id, server_id)
    if sorted(names) != list(range(world_size)):
        raise _error(path, f"describes {len(names)} ranks, and the job has ranks 0 to {world_size - 1}")
    return [names[rank] for rank in range(world_size)]


def _supernodes(table: dict[str, object], path: str) -> Iterator[tuple[str, str]]:
    """Pairs of server and super pod."""
    seen: set[str] = set()
    for pod in _objects(table, "super_pod_list", path):
        for server in _objects(pod, "server_list", path):
            server_id = _text(server, "server_id", path)
            if server_id in seen:
                raise _error(path, f"lists server {server_id!r} in two super pods")
            seen.add(server_id)
            yield server_id, _text(pod, "super_pod_id", path)


def _objects(holder: dict[str, object], key: str, path: str) -> list[dict[str, object]]:
    value = holder.get(key)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise _error(path, f"has no list of objects under {key!r}")
    return value


def _text(holder: dict[str, object], key: str, path: str) -> str:
    value = holder.get(key)
    if not isinstance(value, str | int):
        raise _error(path, f"lacks {key!r} somewhere")
    return str(value)


def _error(path: str, why: str) -> ConfigError:
    return ConfigError(
        OPTION, path, why, "write the rank table anew, or unset the variable and set ranks_per_supernode"
    )
