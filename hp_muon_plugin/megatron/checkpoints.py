"""Saving and resuming a run of any Megatron trainer whose model and optimizer are ours, or Megatron's without shards.

    team = Team()
    saver = Saver(Path("checkpoints"), team, keep=3, asynchronous=True)
    save_run(saver, iteration, [model], optimizer, RunState(iteration=iteration, consumed_samples=seen))
    ...
    saver.poll()  # after each step: publishes what has been written, raises what could not be

    found = open_latest(Path("checkpoints"), team)
    if found is not None:
        state = load_run(found, [model], optimizer, team)

All functions are collective. What trainers keep themselves (scheduler, position in the data) travels in the run state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from hp_muon_plugin.checkpoint.agreement import Team
from hp_muon_plugin.checkpoint.canonical import RunState
from hp_muon_plugin.checkpoint.loading import Found, open_checkpoint, open_latest, read_state
from hp_muon_plugin.checkpoint.parts import Part
from hp_muon_plugin.checkpoint.saving import Saver
from hp_muon_plugin.megatron.contents import saved_parts
from hp_muon_plugin.megatron.random_state import put_random_state, take_random_state
from hp_muon_plugin.megatron.restore import restore

__all__ = ["Found", "RunState", "Saver", "Team", "load_run", "open_checkpoint", "open_latest", "save_run"]


def save_run(saver: Saver, iteration: int, chunks: Sequence[torch.nn.Module], optimizer: Any, state: RunState) -> None:
    """Save weights, masters, optimizer state, random states and a run state, or begin to.

    Args:
        saver: The run's.
        iteration: Optimizer steps done.
        chunks: Wrapped model chunks of this rank; no forward or backward pass is under way.
        optimizer: A MegatronOptimizer, ours or Megatron's.
        state: What else is kept; rank 0's is. ``hyper``, ``steps``, ``momentum`` and ``random`` are filled in.

    Raises:
        CheckpointError: On every rank, if one of them failed, also in an earlier asynchronous save.
    """

    def contents() -> tuple[list[Part], RunState]:
        parts, own = saved_parts(chunks, optimizer)
        rank = dist.get_rank() if dist.is_initialized() else 0
        random = {f"rank{rank}": take_random_state(_device(chunks))}
        filled = replace(
            state, iteration=iteration, hyper=own.hyper, steps=own.steps, momentum=own.momentum, random=random
        )
        return parts, filled

    saver.save(iteration, contents)


def load_run(
    found: Found,
    chunks: Sequence[torch.nn.Module],
    optimizer: Any,
    team: Team,
    *,
    load_optimizer: bool = True,
    model_options: Mapping[str, Any] | None = None,
) -> RunState:
    """Load what :func:`save_run` saved, at any number of ranks and any layout.

    Random states are read and not restored: :func:`restore_random` does that, just before training begins.

    Args:
        found: From :func:`open_checkpoint` or :func:`open_latest`.
        chunks: Wrapped model chunks of this rank.
        optimizer: A MegatronOptimizer, ours or Megatron's.
        team: The ranks.
        load_optimizer: Whether state of the optimizer is loaded; float32 masters are in any case.
        model_options: Options of this run's model, by which an error says what differs.

    Returns:
        The run state, with the random states of this rank.

    Raises:
        CheckpointError: On every rank, if the checkpoint is damaged or of another model or optimizer.
    """
    restore(found, chunks, optimizer, team, load_optimizer=load_optimizer, model_options=model_options)
    own = f"random/rank{team.rank}/"
    states: list[RunState] = []

    def load() -> None:
        states.append(read_state(found, lambda name: name.startswith((own, "other/", "data/"))))

    team.all(f"reading {found.folder}", load)
    return states[0]


def restore_random(state: RunState, rank: int, chunks: Sequence[torch.nn.Module]) -> bool:
    """Go on from this rank's random state. Nothing may draw between this and the first step.

    Args:
        state: From :func:`load_run`.
        rank: Global rank.
        chunks: Model chunks, for their device.

    Returns:
        False if the checkpoint has no random state of such a rank; then nothing is changed.
    """
    saved = state.random.get(f"rank{rank}")
    if saved is None:
        return False
    put_random_state(saved, _device(chunks))
    return True


def _device(chunks: Sequence[torch.nn.Module]) -> torch.device:
    return next((param.device for chunk in chunks for param in chunk.parameters()), torch.device("cpu"))
