"""Batches in which ranks apply factors to the rows that they hold, and no update is sent.

The polar factor is ``X Q`` of a tall matrix and ``Q X`` of a wide one, ``Q`` a polynomial of the Gram
matrix of the short side, and symmetric. Gram matrices of slices of the long side add up. So what ranks
exchange beside (or instead of) their rows are matrices of the short side:

* ``GRAM``: ranks hold rows of tall matrices. Each forms ``X_r^T X_r``; sums go to owners.
* ``GATHERED_GRAM``: ranks hold rows of wide matrices. All of them are gathered, each rank forms
  ``X_c X_c^T`` of a stretch of columns; sums go to owners.
* ``FACTORS``: all rows are gathered, owners form the Gram matrices of their items.

Then owners iterate, factors are gathered, and every rank applies them to its own rows.
"""

from collections.abc import Generator

import torch

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.muon.algorithm import Algorithm, Form
from hp_muon_plugin.muon.distributed.items import Item
from hp_muon_plugin.muon.distributed.messages import Messages, side
from hp_muon_plugin.muon.distributed.parts import Parts
from hp_muon_plugin.muon.distributed.plan import Route
from hp_muon_plugin.muon.newton_schulz import NewtonSchulz
from hp_muon_plugin.muon.precision import ieee_float32, settings
from hp_muon_plugin.muon.scale import update_scale
from hp_muon_plugin.muon.workspace import Workspace
from hp_muon_plugin.platform.collectives import AxisGroup
from hp_muon_plugin.platform.protocol import Handle, Wire
from hp_muon_plugin.platform.spans import NEWTON_SCHULZ, span
from hp_muon_plugin.platform.wire import wait_for

_WHAT = "exchange of Gram matrices and factors over {}"


class FactoredBatch:
    """One batch by the routes ``GRAM``, ``GATHERED_GRAM`` and ``FACTORS``.

    Args:
        messages: The batch.
        axis: Its axis.
        wire: Collectives.
        config: Options.
        workspace: Buffers.
    """

    def __init__(
        self, messages: Messages, axis: AxisGroup, *, wire: Wire, config: HpMuon, workspace: Workspace
    ) -> None:
        self._messages, self._axis, self._wire, self._workspace = messages, axis, wire, workspace
        self._slot = 0
        self._dtype: torch.dtype = getattr(torch, config.comm_dtype)
        self._route = messages.batch.route
        self._entries = list(messages.items)
        self._engine = NewtonSchulz(
            messages.plan.coefficients, Algorithm(Form.gram), device=workspace.device, workspace=workspace
        )
        self._scales = {
            index: update_scale(config.scale, *_shape(item), factor=config.scale_factor)
            for index, item, _ in self._entries
        }
        self._settings = settings(workspace.device)
        self._factors_of_two: dict[int, torch.Tensor] = {}
        self.num_orthogonalized = 0
        """Matrices whose factors this rank has computed since construction."""

    def steps(self, parts: Parts, slot: int) -> Generator[list[Handle]]:
        """Run the batch; each ``next`` begins the next messages after waiting for the ones before.

        Args:
            parts: This rank's parts.
            slot: Number of the set of buffers; batches that run at the same time have different ones.

        Yields:
            What it waits for next, after each round of messages; of a batch that has begun before its step, Gram
            matrices are a round of their own.
        """
        self._slot = slot
        handles = self._send_parts(parts)
        yield handles
        wait_for(handles, _WHAT, self._axis.axis)
        self._bring_in_range()
        for number, run in enumerate(self._engine.runs):
            with span(NEWTON_SCHULZ), ieee_float32(self._settings):
                self._form_grams()
            handles = self._send_grams()
            if parts.is_ahead:
                yield handles
            wait_for(handles, _WHAT, self._axis.axis)
            own, handles = self._send_factors(run, is_first=number == 0)
            yield handles
            wait_for(handles, _WHAT, self._axis.axis)
            with span(NEWTON_SCHULZ), ieee_float32(self._settings):
                self._apply(parts, own, is_last=number == len(self._engine.runs) - 1)

    def _take(self, name: str, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self._workspace.take(f"share_{name}{self._slot}", (numel,), dtype)

    def _send_parts(self, parts: Parts) -> list[Handle]:
        rank, places = self._axis.index, self._messages.gathered[1]
        handles: list[Handle] = []
        own = self._own()
        for index, item, _ in self._entries:
            first = places[rank][index]
            parts.write(item, own[first : first + item.held(rank)])
        if self._route.gathers and own.numel():
            sent = self._take("send", own.numel(), self._dtype)
            if sent.dtype is not own.dtype:
                sent.copy_(own)
                own.copy_(sent)  # all ranks work on the same rounded numbers
            received = self._take("received", self._axis.size * own.numel(), self._dtype)
            # the longest part of each rank; Gram matrices wait
            handles.append(self._wire.all_gather(received, sent, self._axis))
        if self._route is not Route.FACTORS:
            largest = self._take("largest", len(self._entries))
            for place, (index, item, _) in enumerate(self._entries):
                held = own[places[rank][index] :][: item.held(rank)]
                _largest(held, largest[place]) if held.numel() else largest[place].zero_()
            every = self._take("every_largest", self._axis.size * len(self._entries))
            # 4 bytes an item from each rank; Gram matrices wait
            handles.append(self._wire.all_gather(every, largest, self._axis))
        return handles

    def _own(self) -> torch.Tensor:
        """This rank's rows of all items, in float32: what is sent, if it is sent in that type."""
        name = "send" if self._route.gathers and self._dtype is torch.float32 else "own"
        return self._take(name, self._messages.gathered[0])

    def _bring_in_range(self) -> None:
        """Scale items by powers of two, alike on all ranks, so that sums of squares neither overflow nor vanish."""
        if self._route is Route.FACTORS:
            return  # owners do so alone
        count = len(self._entries)
        largest = self._take("every_largest", self._axis.size * count).view(self._axis.size, count).amax(0)
        factors = powers_of_two(largest)
        if self._workspace.device.type == "cpu" and bool((factors == 1).all()):
            return
        places = self._messages.gathered[1]
        for rank in range(self._axis.size) if self._route.gathers else (self._axis.index,):
            for place, (index, item, _) in enumerate(self._entries):
                self._rows(rank, index, item, places).mul_(factors[place])
        if self._route.gathers:
            for place, (index, item, _) in enumerate(self._entries):
                first = places[self._axis.index][index]
                self._own()[first : first + item.held(self._axis.index)].mul_(factors[place])

    def _rows(self, rank: int, index: int, item: Item, places: list[dict[int, int]]) -> torch.Tensor:
        """Rows of an item that a rank holds, as this rank has them."""
        first = places[rank][index]
        if not self._route.gathers:
            return self._own()[first : first + item.held(rank)]
        longest = self._messages.gathered[0]
        return self._take("received", self._axis.size * longest, self._dtype)[rank * longest + first :][
            : item.held(rank)
        ]

    def _form_grams(self) -> None:
        """Write this rank's share of every Gram matrix where its owner's sums are taken."""
        small, offsets = self._messages.small
        grams = self._take("grams", self._axis.size * small).zero_()
        rank, places = self._axis.index, self._messages.gathered[1]
        for index, item, owner in self._entries:
            rows, cols = _shape(item)
            short = min(rows, cols)
            gram = grams[owner * small + offsets[index] :][: short * short].view(short, short)
            if self._route is Route.GRAM:
                x = self._rows(rank, index, item, places).view(-1, cols)
                torch.mm(x.t(), x, out=gram)
            elif self._route is Route.GATHERED_GRAM:
                first, last = rank * cols // self._axis.size, (rank + 1) * cols // self._axis.size
                slab = self._take("slab", rows * (last - first)).view(rows, last - first)
                for other in item.holders:
                    low, high = (cut // cols for cut in item.span(other))
                    slab[low:high].copy_(self._rows(other, index, item, places).view(-1, cols)[:, first:last])
                torch.mm(slab, slab.t(), out=gram)
            elif owner == rank:
                whole = self._take("whole", item.numel)
                for other in item.holders:
                    whole[slice(*item.span(other))].copy_(self._rows(other, index, item, places))
                factor = powers_of_two(_largest(whole, self._take("largest", 1)[0]))
                x = whole.mul_(factor).view(rows, cols)
                torch.mm(x, x.t(), out=gram) if rows <= cols else torch.mm(x.t(), x, out=gram)
                self._factors_of_two[index] = factor

    def _send_grams(self) -> list[Handle]:
        small, _ = self._messages.small
        sums = self._take("sums", small)
        grams = self._take("grams", self._axis.size * small)
        if self._route is Route.FACTORS:
            sums.copy_(grams[self._axis.index * small :][:small])
            return []
        # the Gram matrices of the owner with most, from each rank to each; the iteration waits
        return [self._wire.reduce_scatter(sums, grams, self._axis)]

    def _send_factors(
        self, run: tuple[tuple[float, float, float], ...], *, is_first: bool
    ) -> tuple[torch.Tensor, list[Handle]]:
        small, offsets = self._messages.small
        sums, own = self._take("sums", small), self._take("factors", small).zero_()
        by_side: dict[int, list[int]] = {}
        for index, item, owner in self._entries:
            if owner == self._axis.index:
                by_side.setdefault(side(item), []).append(index)
        for short, indices in by_side.items():
            first, count = min(offsets[index] for index in indices), len(indices)
            stretch = slice(first, first + count * short * short)
            grams = sums[stretch].view(count, short, short)
            with span(NEWTON_SCHULZ):
                own[stretch].view(count, short, short).copy_(self._engine.factor(grams, run, is_first=is_first))
            self.num_orthogonalized += count if is_first else 0
        for index, factor in self._factors_of_two.items():
            own[offsets[index] :][: side(self._messages.plan.items[index]) ** 2].mul_(factor)
        every = self._take("every_factor", self._axis.size * small)
        # the factors of the owner with most, from each rank; the weights wait
        return every, [self._wire.all_gather(every, own, self._axis)]

    def _apply(self, parts: Parts, every: torch.Tensor, *, is_last: bool) -> None:
        small, offsets = self._messages.small
        rank, places = self._axis.index, self._messages.gathered[1]
        for index, item, owner in self._entries:
            if not item.held(rank):
                continue
            rows, cols = _shape(item)
            short = min(rows, cols)
            factor = every[owner * small + offsets[index] :][: short * short].view(short, short)
            first = places[rank][index]
            x = self._own()[first : first + item.held(rank)].view(-1, cols)
            if not is_last:
                x.copy_(torch.mm(x, factor.t(), out=self._take("product", x.numel()).view_as(x)))
            elif rows >= cols:
                parts.apply_product(item, x, factor.t(), self._scales[index])
            else:
                update = self._take("product", x.numel()).view_as(x)
                low, high = (cut // cols for cut in item.span(rank))
                is_first = True
                for other in item.holders:
                    start, stop = (cut // cols for cut in item.span(other))
                    theirs = self._rows(other, index, item, places).view(-1, cols).to(torch.float32)
                    torch.addmm(update, factor[low:high, start:stop], theirs, beta=0.0 if is_first else 1.0, out=update)
                    is_first = False
                parts.apply(item, update.view(-1).mul_(self._scales[index]))


def _shape(item: Item) -> tuple[int, int]:
    assert item.matrix is not None, item
    return item.matrix


def _largest(held: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Largest magnitude, without a copy of the entries."""
    found: torch.Tensor = torch.linalg.vector_norm(held, ord=torch.inf, out=out)
    return found


def powers_of_two(largest: torch.Tensor) -> torch.Tensor:
    """Factors that bring the largest entries between a half and one where their squares could leave float32.

    Args:
        largest: Largest absolute values, float32.

    Returns:
        Powers of two of the same shape; 1 where nothing needs to be done, or the value is zero, infinite or NaN.
    """
    exponent = torch.frexp(largest).exponent
    is_far = (exponent.abs() > 40) & largest.isfinite() & (largest > 0)
    return torch.ldexp(torch.ones_like(largest), torch.where(is_far, -exponent.clamp(-126, 126), 0))
