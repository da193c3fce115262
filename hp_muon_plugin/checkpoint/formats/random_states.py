"""Random states of Megatron's ranks, named by pipeline and tensor rank."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hp_muon_plugin.checkpoint.canonical import Loss, RunState
from hp_muon_plugin.checkpoint.run_values import plain, random_state

_KEYS = {"random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state", "rng_tracker_states"}
_NAME = re.compile(r"pp(\d+)\.tp(\d+)")
_OURS = re.compile(r"rank(\d+)")


def rank_name(pipeline: int, tensor: int, *, expert: int | None = None, data: int = 0) -> str:
    """Name of a rank's random state in :attr:`RunState.random`.

    Args:
        pipeline: Its pipeline rank.
        tensor: Its tensor-parallel rank.
        expert: Its expert-parallel rank, if the format keeps one state for each.
        data: Its data-parallel rank.
    """
    return f"pp{pipeline}.tp{tensor}" + (f".ep{expert}" if expert is not None else "") + (f".dp{data}" if data else "")


def by_place(state: RunState) -> dict[str, Any]:
    """Random states by names of Megatron's ranks; those that a run of ours saved get the name of their rank's place.

    Megatron numbers ranks by tensor, data and pipeline rank, the first fastest; a run of ours says how many there were.
    Without a device the CPU's state stands in for the device's, as with Megatron on CPU.

    Args:
        state: Of the source.
    """
    sizes = state.other.get("ranks")
    ours = {int(match[1]): item for name, item in state.random.items() if (match := _OURS.fullmatch(name))}
    if not isinstance(sizes, Mapping) or set(ours) != set(range(sizes["ranks"])):
        return dict(state.random)
    tp, pp, ep = sizes["tp"], sizes["pp"], sizes["ep"]
    etp, stage = sizes.get("etp") or tp, sizes["ranks"] // pp
    found: dict[str, Any] = {}
    for rank, item in ours.items():
        pipeline, tensor, data = rank // stage, rank % tp, rank % stage // tp
        states = {"states": _as_megatron(item)}
        if ep == 1:
            found.setdefault(rank_name(pipeline, tensor), states)
            continue
        expert = rank % stage // etp % ep
        found.setdefault(rank_name(pipeline, tensor, expert=expert or None), states)
        found[f"{rank_name(pipeline, tensor)}.dp{data}"] = states
    return found


def _as_megatron(item: Mapping[str, Any]) -> Any:
    saved = item["numpy"]
    keys = saved["keys"].numpy().astype(np.uint32)
    return plain(
        {
            "random_rng_state": item["python"],
            "np_rng_state": (saved["kind"], keys, saved["position"], saved["has_gauss"], saved["gauss"]),
            "torch_rng_state": item["torch"],
            "cuda_rng_state": item.get("device", item["torch"]),
            "rng_tracker_states": dict(item["tracker"]),
        }
    )


def megatron_random(state: RunState, ranks: Sequence[tuple[int, int]]) -> dict[tuple[int, int], dict[str, Any]]:
    """Random states as Megatron has them, of the (pipeline, tensor) ranks that have one.

    Args:
        state: Of the source.
        ranks: Wanted.
    """
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for name, values in by_place(state).items():
        place = _NAME.match(name)
        states = values.get("states") if isinstance(values, dict) else None
        if place and isinstance(states, dict) and set(states) == _KEYS:
            rank = int(place[1]), int(place[2])
            if rank in ranks:
                found.setdefault(rank, random_state(states))
    return found


def random_losses(state: RunState, ranks: Sequence[tuple[int, int]]) -> list[Loss]:
    """One line if Megatron will not find a random state for each rank.

    Args:
        state: Of the source.
        ranks: (pipeline, tensor) ranks of the target.
    """
    missing = len(ranks) - len(megatron_random(state, ranks))
    if not missing:
        return []
    text = (
        f"random state of {missing} of {len(ranks)} ranks: the source has none as Megatron keeps it, so load with "
        "--no-load-rng; every rank then starts from the seed"
    )
    return [Loss(text)]
