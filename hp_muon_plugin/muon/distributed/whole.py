"""Batches in which items become whole on their owners, or everywhere, and updates come back."""

from collections.abc import Generator, Mapping

import torch

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.muon.distributed.items import Item
from hp_muon_plugin.muon.distributed.messages import Messages
from hp_muon_plugin.muon.distributed.parts import Parts
from hp_muon_plugin.muon.distributed.plan import Route
from hp_muon_plugin.muon.executor import Executor, ParamStep
from hp_muon_plugin.muon.plan import build_plan
from hp_muon_plugin.muon.workspace import Workspace
from hp_muon_plugin.platform.collectives import AxisGroup
from hp_muon_plugin.platform.protocol import Handle, Wire
from hp_muon_plugin.platform.wire import wait_for

_WHAT = "exchange of momenta and updates over {}"


class WholeBatch:
    """One batch by the routes ``EVERYWHERE``, ``UPDATES`` and ``OWNER``.

    Args:
        messages: The batch.
        axis: Its axis.
        axes: Tensor-parallel axes by name.
        wire: Collectives.
        config: Options.
        workspace: Buffers.
    """

    def __init__(
        self,
        messages: Messages,
        axis: AxisGroup,
        axes: Mapping[str, AxisGroup],
        *,
        wire: Wire,
        config: HpMuon,
        workspace: Workspace,
    ) -> None:
        self._messages, self._axis, self._wire, self._workspace = messages, axis, wire, workspace
        self._slot = 0
        self._dtype: torch.dtype = getattr(torch, config.comm_dtype)
        self._route = messages.batch.route
        is_everywhere = self._route is Route.EVERYWHERE
        self._mine = [
            (index, item)
            for index, item, owner in messages.items
            if (item.held(axis.index) if is_everywhere else owner == axis.index)
        ]
        specs = [item.spec for _, item in self._mine]
        self._executor = Executor(
            build_plan(specs, config, device=workspace.device.type),
            axes,
            nesterov=False,
            device=workspace.device,
            workspace=workspace,
        )

    @property
    def num_orthogonalized(self) -> int:
        """Matrices that this rank has orthogonalised since construction."""
        return self._executor.num_orthogonalized

    def steps(self, parts: Parts, slot: int) -> Generator[list[Handle]]:
        """Run the batch; each ``next`` begins the next messages after waiting for the ones before.

        Args:
            parts: This rank's parts.
            slot: Number of the set of buffers; batches that run at the same time have different ones.

        Yields:
            What it waits for next, twice: after the parts and after the updates are under way.
        """
        self._slot = slot
        arrived = self._send_parts(parts)
        yield arrived
        wait_for(arrived, _WHAT, self._axis.axis)
        updates = self._orthogonalize(parts)
        returned = self._send_updates(updates)
        yield returned
        wait_for(returned, _WHAT, self._axis.axis)
        self._apply(parts, updates)

    def _take(self, name: str, numel: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._workspace.take(f"share_{name}{self._slot}", (numel,), dtype or self._dtype)

    def _send_parts(self, parts: Parts) -> list[Handle]:
        messages, axis = self._messages, self._axis
        if self._route.gathers:
            longest, places = messages.gathered
            own = self._take("send", longest)
            for index, item, _ in messages.items:
                first = places[axis.index][index]
                parts.write(item, own[first : first + item.held(axis.index)])
            received = self._take("received", axis.size * longest)
            # the longest part of each rank; what is orthogonalised waits
            return [self._wire.all_gather(received, own, axis)]
        sent = [messages.exchanged_numel(axis.index, other) for other in range(axis.size)]
        incoming = [messages.exchanged_numel(other, axis.index) for other in range(axis.size)]
        send, received = self._take("send", sum(sent)), self._take("received", sum(incoming))
        place = 0
        for other in range(axis.size):
            if other == axis.index:
                continue
            for index, start, stop in messages.exchanged(axis.index, other):
                parts.write(self._item(index), send[place : place + stop - start])
                place += stop - start
        # each part once, to its owner; what is orthogonalised waits
        return [self._wire.all_to_all(received, send, incoming, sent, axis)]

    def _item(self, index: int) -> Item:
        return self._messages.plan.items[index]

    def _orthogonalize(self, parts: Parts) -> dict[int, torch.Tensor]:
        """Assemble this rank's items and compute their scaled polar factors."""
        total = sum(item.numel for _, item in self._mine)
        wholes, updates = self._take("whole", total, torch.float32), self._take("update", total, torch.float32)
        if self._executor.is_fused_by_lists or any(item.spec.split is not None for _, item in self._mine):
            updates.zero_()  # what is there is multiplied by 0, and might be NaN
        received = self._arrived()
        place, found, steps = 0, {}, []
        for index, item in self._mine:
            whole, update = wholes[place : place + item.numel], updates[place : place + item.numel]
            for rank in item.holders:
                low, high = item.span(rank)
                if rank == self._axis.index:
                    parts.write(item, whole[low:high])
                else:
                    whole[low:high].copy_(received[rank, index])
            found[index] = update
            # lr -1: the update itself; the weight is zero, and whoever holds a part applies its own rate to it
            steps.append(ParamStep(update, whole, whole, 0.0, -1.0, 0.0))
            place += item.numel
        self._executor.run(steps)
        return found

    def _arrived(self) -> dict[tuple[int, int], torch.Tensor]:
        """Parts of this rank's items by rank and item."""
        messages, axis = self._messages, self._axis
        found: dict[tuple[int, int], torch.Tensor] = {}
        if self._route.gathers:
            longest, places = messages.gathered
            received = self._take("received", axis.size * longest).view(axis.size, longest)
            for index, item in self._mine:
                for rank in item.holders:
                    first = places[rank][index]
                    found[rank, index] = received[rank, first : first + item.held(rank)]
            return found
        received = self._take(
            "received", sum(messages.exchanged_numel(other, axis.index) for other in range(axis.size))
        )
        place = 0
        for rank in range(axis.size):
            if rank == axis.index:
                continue
            for index, start, stop in messages.exchanged(rank, axis.index):
                found[rank, index] = received[place : place + stop - start]
                place += stop - start
        return found

    def _send_updates(self, updates: Mapping[int, torch.Tensor]) -> list[Handle]:
        messages, axis = self._messages, self._axis
        if self._route is Route.EVERYWHERE:
            return []
        if self._route is Route.OWNER:
            sent = [messages.exchanged_numel(other, axis.index) for other in range(axis.size)]
            incoming = [messages.exchanged_numel(axis.index, other) for other in range(axis.size)]
            send, received = self._take("send_back", sum(sent)), self._take("back", sum(incoming))
            place = 0
            for rank in range(axis.size):
                if rank == axis.index:
                    continue
                for index, start, stop in messages.exchanged(rank, axis.index):
                    send[place : place + stop - start].copy_(updates[index][start:stop])
                    place += stop - start
            # each part once, from its owner; the weights wait
            return [self._wire.all_to_all(received, send, incoming, sent, axis)]
        longest, places = messages.whole
        back = self._take("back", axis.size * longest).view(axis.size, longest)
        for index, update in updates.items():
            back[axis.index, places[index] : places[index] + update.numel()].copy_(update)
        if messages.is_broadcast:
            owners = sorted(set(messages.batch.owners))
            # all updates of each owner to every rank; the weights wait
            return [self._wire.broadcast(back[o, : messages.owned[o]], o, axis) for o in owners]
        # the updates of the owner with most, from each rank; the weights wait
        return [self._wire.all_gather(back.view(-1), back[axis.index], axis)]

    def _apply(self, parts: Parts, updates: Mapping[int, torch.Tensor]) -> None:
        messages, rank = self._messages, self._axis.index
        for index, update in updates.items():
            item = self._item(index)
            parts.apply(item, update[slice(*item.span(rank))])
        if self._route is Route.OWNER:
            back, place = self._take("back", sum(messages.exchanged_numel(rank, o) for o in range(self._axis.size))), 0
            for owner in range(self._axis.size):
                if owner == rank:
                    continue
                for index, start, stop in messages.exchanged(rank, owner):
                    parts.apply(self._item(index), back[place : place + stop - start])
                    place += stop - start
        elif self._route is Route.UPDATES:
            longest, places = messages.whole
            whole = self._take("back", self._axis.size * longest).view(self._axis.size, longest)
            for index, item, owner in messages.items:
                if owner != rank:
                    low, high = item.span(rank)
                    parts.apply(item, whole[owner, places[index] + low : places[index] + high])
