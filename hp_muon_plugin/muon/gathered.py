"""Stages whose pieces are made whole: on every rank of the axis, or each on one rank that owns it."""

from collections.abc import Sequence

import torch

from hp_muon_plugin.muon.matrix_view import fill_from_shards, local_slice
from hp_muon_plugin.muon.stage import Stage
from hp_muon_plugin.muon.stage_tools import StageTools, Steps, apply_update
from hp_muon_plugin.platform.collectives import AxisGroup
from hp_muon_plugin.platform.wire import wait_for

_WHAT = "exchange of momenta and updates over {}"


def run_gathered(tools: StageTools, stage: Stage, steps: Steps, axis: AxisGroup) -> None:
    """Gather, orthogonalise everything on every rank, and take the own part.

    Args:
        tools: What stages share.
        stage: A stage that goes ``gather``.
        steps: Of all pieces; None for those that are left alone, the same on every rank of the axis.
        axis: The axis.
    """
    members = [index for index in stage.pieces if steps[index] is not None]
    if not members:
        return
    local = sum(tools.spec(index).local_numel for index in members)
    send = tools.workspace.take("send", (local,))
    received = tools.workspace.take("received", (axis.size * local,))
    tools.pack_updates(send, members, steps)
    # all-gather over the axis: each rank sends `local` float32 numbers once per stage; the host waits
    wait_for([tools.wire.all_gather(received, send, axis)], _WHAT, axis.axis)
    wholes = _wholes(tools, members, received.view(axis.size, local))
    for batch in stage.batches:
        tools.orthogonalize_wholes(batch, wholes)
    for index in members:
        step, split = steps[index], tools.spec(index).split
        assert step is not None
        assert split is not None
        apply_update(step, local_slice(wholes[index], split, axis.index))


def run_owned(tools: StageTools, stage: Stage, steps: Steps, axis: AxisGroup) -> None:
    """Send slices to the owner of each piece, which alone orthogonalises it, and slices of the result back.

    Args:
        tools: What stages share.
        stage: A stage that goes ``owner``.
        steps: Of all pieces; None for those that are left alone, the same on every rank of the axis.
        axis: The axis.
    """
    present = [(owner, i) for i, owner in zip(stage.pieces, stage.owners, strict=True) if steps[i] is not None]
    if not present:
        return
    present.sort()  # the message goes to owners in axis order
    members, owned = [i for _, i in present], [i for owner, i in present if owner == axis.index]
    sent = [sum(tools.spec(i).local_numel for owner, i in present if owner == to) for to in range(axis.size)]
    own = sent[axis.index]
    slices = tools.workspace.take("send", (sum(sent),))
    received = tools.workspace.take("received", (axis.size * own,))
    tools.pack_updates(slices, members, steps)
    # all-to-all over the axis: every slice to its owner; the host waits
    wait_for([tools.wire.all_to_all(received, slices, [own] * axis.size, sent, axis)], _WHAT, axis.axis)
    shards = received.view(axis.size, own)
    wholes = _wholes(tools, owned, shards)
    for batch in stage.batches_of(axis.index):
        tools.orthogonalize_wholes(batch, wholes)
    _to_shards(tools, owned, wholes, shards)
    # all-to-all back: every rank receives its slices of all results; the host waits
    wait_for([tools.wire.all_to_all(slices, received, sent, [own] * axis.size, axis)], _WHAT, axis.axis)
    offset = 0
    for index in members:
        step, spec = steps[index], tools.spec(index)
        assert step is not None
        apply_update(step, slices[offset : offset + spec.local_numel].view(step.weight.shape))
        offset += spec.local_numel


def _wholes(tools: StageTools, members: Sequence[int], shards: torch.Tensor) -> dict[int, torch.Tensor]:
    """Put the ranks' slices together: whole pieces, contiguous, from ``(size, local numel of all)``."""
    pool = tools.workspace.take("whole", (sum(tools.spec(index).numel for index in members),))
    wholes, offset, start = dict[int, torch.Tensor](), 0, 0
    for index in members:
        spec = tools.spec(index)
        assert spec.split is not None
        wholes[index] = pool[start : start + spec.numel]
        fill_from_shards(wholes[index], shards[:, offset : offset + spec.local_numel], spec.split)
        offset, start = offset + spec.local_numel, start + spec.numel
    return wholes


def _to_shards(
    tools: StageTools, members: Sequence[int], wholes: dict[int, torch.Tensor], shards: torch.Tensor
) -> None:
    """Cut whole pieces into the ranks' slices again."""
    offset = 0
    for index in members:
        spec = tools.spec(index)
        assert spec.split is not None
        for place in range(spec.split.size):
            target = shards[place, offset : offset + spec.local_numel].view(spec.split.local_factors())
            target.copy_(local_slice(wholes[index], spec.split, place))
        offset += spec.local_numel
