"""What a rank writes of a model and its optimizer."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hp_muon_plugin.checkpoint.canonical import Key, Kind, Momentum, RunState
from hp_muon_plugin.checkpoint.parts import Part
from hp_muon_plugin.checkpoint.ranges import held_chunks
from hp_muon_plugin.errors import CheckpointError
from hp_muon_plugin.megatron.groups import megatron_groups
from hp_muon_plugin.megatron.held import Held, canonical_name, held_params
from hp_muon_plugin.megatron.optimizer import HpMuonMegatronOptimizer
from hp_muon_plugin.megatron.specs import chunk_buffers

MOMENTS = (Kind.exp_avg, Kind.exp_avg_sq)
STEP = "step"
_PLAIN = (bool, int, float, str, type(None), tuple, list)


def saved_parts(chunks: Sequence[torch.nn.Module], optimizer: Any) -> tuple[list[Part], RunState]:
    """What this rank writes, straight from its memory.

    Args:
        chunks: Wrapped model chunks of this rank; no forward or backward pass is under way.
        optimizer: A MegatronOptimizer, ours or Megatron's.

    Returns:
        Parts that are views of live tensors, and ``hyper``, ``steps`` and ``momentum`` of what it writes.

    Raises:
        CheckpointError: If the optimizer has state that this format cannot hold.
    """
    complete_state(optimizer)
    parts, state = list[Part](), RunState()
    if isinstance(optimizer, HpMuonMegatronOptimizer) and any(
        group.get("algorithm") == "muon" for group in optimizer.param_groups
    ):
        state.momentum = Momentum.average
    for held in held_params(chunks, optimizer):
        if not held.is_written:
            continue
        for kind, tensor in _tensors(held, state.steps):
            parts.append(part_of(held, kind, tensor))
        if held.group is not None:
            state.hyper[held.name] = plain_values(held.group)
    parts += [part for part, is_written in buffer_parts(chunks) if is_written]
    return parts, state


def complete_state(optimizer: Any) -> None:
    """Create optimizer state that no step has created yet: zeros.

    Args:
        optimizer: A MegatronOptimizer, ours or Megatron's with AdamW.
    """
    if isinstance(optimizer, HpMuonMegatronOptimizer):
        optimizer.optimizer.init_state()
        return
    for single in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        for group in [] if single.optimizer is None else single.optimizer.param_groups:
            for main in group["params"]:
                state = single.optimizer.state[main]
                if Kind.exp_avg not in state:
                    state |= {str(kind): torch.zeros_like(main) for kind in MOMENTS}
                    if counts_by_parameter(single.optimizer):
                        state[STEP] = torch.zeros((), dtype=torch.float32)


def counts_by_parameter(inner: Any) -> bool:
    """Whether an AdamW counts steps for each parameter, as torch's; fused ones count for each group.

    Args:
        inner: The optimizer inside Megatron's.

    Returns:
        True for torch's.
    """
    return isinstance(inner, torch.optim.Adam | torch.optim.AdamW)


def part_of(held: Held, kind: str, tensor: torch.Tensor) -> Part:
    """A rank's part of a tensor that has a parameter's layout.

    Args:
        held: The parameter.
        kind: What the tensor is to it.
        tensor: What this rank holds of it.

    Returns:
        The part.
    """
    return Part(str(Key(held.name, str(kind))), held.spec.shape, held.chunks, tensor, held.start)


def buffer_parts(chunks: Sequence[torch.nn.Module]) -> list[tuple[Part, bool]]:
    """Persistent buffers, and whether this rank writes them.

    Megatron's Float16Module rounds a router's ``expert_bias`` with the weights, and its first forward pass makes it
    float32 again; before that one, a value that is read into it would lose bits.

    Args:
        chunks: Model chunks of this rank.

    Returns:
        Parts that are the live buffers.
    """
    groups, found = megatron_groups(), []
    for module in (module for chunk in chunks for module in chunk.modules()):
        router: Any = module
        if hasattr(router, "_maintain_float32_expert_bias"):
            router._maintain_float32_expert_bias()
    for name, buffer in chunk_buffers(chunks, groups).items():
        dp, tp = (groups.expert_dp, groups.etp) if ".experts." in name else (groups.dp, groups.tp)
        is_written = dp.index == 0 and tp.index == 0
        shape = tuple(buffer.shape)
        whole = held_chunks(shape, None, 0, 0, buffer.numel())
        found.append((Part(str(Key(canonical_name(name), Kind.buffer)), shape, whole, buffer), is_written))
    return found


def plain_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a parameter group that a checkpoint keeps.

    Args:
        group: The group.

    Returns:
        All but its parameters.
    """
    return {str(key): value for key, value in group.items() if key != "params" and isinstance(value, _PLAIN)}


def _tensors(held: Held, steps: dict[str, float]) -> list[tuple[str, torch.Tensor]]:
    found: list[tuple[str, torch.Tensor]] = [(Kind.weight, held.weight)]
    if held.main is not None:
        found.append((Kind.main, held.main))
    for name, value in (held.state or {}).items():
        if name == STEP:
            steps[held.name] = float(value)
        elif isinstance(value, torch.Tensor) and value.numel() == held.numel:
            found.append((name, value))
        else:
            raise CheckpointError(
                f"{held.name}: the optimizer keeps {name!r} of another shape than the weight, which this format "
                "cannot hold\n  fix: save with the optimizer hp_muon or adamw"
            )
    if held.group is not None and STEP in held.group and STEP not in (held.state or {}):
        steps[held.name] = float(held.group[STEP])
    return found
