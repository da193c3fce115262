"""Random states of Megatron's ranks, named by pipeline and tensor rank."""

import re
from collections.abc import Sequence
from typing import Any

from hp_muon_plugin.checkpoint.canonical import RunState
from hp_muon_plugin.checkpoint.run_values import random_state

_KEYS = {"random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state", "rng_tracker_states"}
_NAME = re.compile(r"pp(\d+)\.tp(\d+)")


def rank_name(pipeline: int, tensor: int, *, expert: int | None = None, data: int = 0) -> str:
    """Name of a rank's random state in :attr:`RunState.random`.

    Args:
        pipeline: Its pipeline rank.
        tensor: Its tensor-parallel rank.
        expert: Its expert-parallel rank, if the format keeps one state for each.
        data: Its data-parallel rank.
    """
    return f"pp{pipeline}.tp{tensor}" + (f".ep{expert}" if expert is not None else "") + (f".dp{data}" if data else "")


def megatron_random(state: RunState, ranks: Sequence[tuple[int, int]]) -> dict[tuple[int, int], dict[str, Any]]:
    """Random states as Megatron has them, of the (pipeline, tensor) ranks that have one.

    Args:
        state: Of the source.
        ranks: Wanted.
    """
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for name, values in state.random.items():
        place = _NAME.match(name)
        states = values.get("states") if isinstance(values, dict) else None
        if place and isinstance(states, dict) and set(states) == _KEYS:
            rank = int(place[1]), int(place[2])
            if rank in ranks:
                found.setdefault(rank, random_state(states))
    return found


def random_losses(state: RunState, ranks: Sequence[tuple[int, int]]) -> list[str]:
    """One line if Megatron will not find a random state for each rank.

    Args:
        state: Of the source.
        ranks: (pipeline, tensor) ranks of the target.
    """
    missing = len(ranks) - len(megatron_random(state, ranks))
    if not missing:
        return []
    return [
        f"random state of {missing} of {len(ranks)} ranks: the source has none as Megatron keeps it, so load with "
        "--no-load-rng; every rank then starts from the seed"
    ]
