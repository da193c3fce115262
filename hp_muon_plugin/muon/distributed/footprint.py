"""Bytes of the buffers that a rank's Muon step keeps, from its plan alone. No torch.

Buffers have names, and each is as large as its largest use (:class:`~hp_muon_plugin.muon.workspace.Workspace`).
Here the same names are asked for in the same sizes. A test compares the sum with that of real steps.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from hp_muon_plugin.config.choices import FloatDtype
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.muon.algorithm import Algorithm
from hp_muon_plugin.muon.coefficients import Coefficients
from hp_muon_plugin.muon.distributed.messages import Messages, side
from hp_muon_plugin.muon.distributed.plan import Batch, Route, SharePlan
from hp_muon_plugin.muon.limits import CPU_CACHE_BYTES, CPU_CUT_FROM, DEVICE_BYTES, SMALL_BUFFERS_BYTES
from hp_muon_plugin.muon.plan import MuonPlan, build_plan

_UNDER_WAY = 2  # batches, as in executor.py
_ALIASING_BYTES, _CACHE_LINE_BYTES = 512, 64  # as in workspace.py
_FLOAT = 4
_Shape = tuple[int, int, int]


class Footprint:
    """Buffers of one rank.

    Args:
        config: Options.
        device: ``cpu``, ``cuda`` or ``npu``.
        num_threads: Of the CPU, by which chunks of matrices are cut.
    """

    def __init__(self, config: HpMuon, device: str, *, num_threads: int = 1) -> None:
        self._config, self._device, self._num_threads = config, device, num_threads
        self._numel: dict[tuple[str, int], int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(itemsize * numel for (_, itemsize), numel in self._numel.items())

    def take(self, name: str, numel: int, itemsize: int = _FLOAT) -> None:
        """Use a buffer.

        Args:
            name: Its name.
            numel: Elements.
            itemsize: Bytes of each.
        """
        self._numel[name, itemsize] = max(self._numel.get((name, itemsize), 0), numel)

    def add_plan(self, plan: SharePlan, rank: int) -> None:
        """Use what the step over one axis uses.

        Args:
            plan: The plan of the axis.
            rank: This rank's place on it.
        """
        local = build_plan([plan.items[index].spec for index in plan.local(rank)], self._config, device=self._device)
        self._whole_matrices(local)
        for slot, batch in _slots(plan):
            messages = Messages(plan, batch)
            self._look_ahead(messages, rank)
            if batch.route.has_factors:
                self._factored(messages, rank, slot)
            else:
                self._whole(messages, rank, slot)

    def _look_ahead(self, messages: Messages, rank: int) -> None:
        """Where gradients (float32), momenta and what is sent have one type, none is needed."""
        types = {self._config.momentum_dtype, self._config.comm_dtype, FloatDtype.float32}
        if self._config.nesterov and len(types) > 1:
            self.take("share_look_ahead", max((item.held(rank) for _, item, _ in messages.items), default=0))

    def _gathered(self, messages: Messages, slot: int) -> None:
        self.take(f"share_send{slot}", messages.longest, messages.plan.itemsize)
        self.take(f"share_received{slot}", messages.plan.size * messages.longest, messages.plan.itemsize)

    def _whole(self, messages: Messages, rank: int, slot: int) -> None:
        plan, route = messages.plan, messages.batch.route
        is_everywhere = route is Route.EVERYWHERE
        mine = [item for _, item, owner in messages.items if (item.held(rank) if is_everywhere else owner == rank)]
        if route.gathers:
            self._gathered(messages, slot)
        else:
            sent, received = messages.moved_numel(rank)
            for name, numel in (("send", sent), ("received", received), ("send_back", received), ("back", sent)):
                self.take(f"share_{name}{slot}", numel, plan.itemsize)
        if route is Route.UPDATES:
            self.take(f"share_back{slot}", plan.size * messages.whole[0], plan.itemsize)
        for name in ("whole", "update"):
            self.take(f"share_{name}{slot}", sum(item.numel for item in mine))
        self._whole_matrices(build_plan([item.spec for item in mine], self._config, device=self._device))

    def _factored(self, messages: Messages, rank: int, slot: int) -> None:
        size, route = messages.plan.size, messages.batch.route
        if route.gathers:
            self._gathered(messages, slot)
        if not route.gathers or messages.plan.itemsize != _FLOAT:
            self.take(f"share_own{slot}", messages.longest)
        if route is not Route.FACTORS:
            self.take(f"share_largest{slot}", len(messages.batch.items))
            self.take(f"share_every_largest{slot}", size * len(messages.batch.items))
        small = messages.small[0]
        for name, times in (("grams", size), ("every_factor", size), ("sums", 1), ("factors", 1)):
            self.take(f"share_{name}{slot}", times * small)
        counts: dict[int, int] = {}
        for _, item, owner in messages.items:
            counts[side(item)] = counts.get(side(item), 0) + (owner == rank)
            rows, cols = item.matrix or (0, 0)
            if route is Route.GATHERED_GRAM:
                self.take(f"share_slab{slot}", rows * ((rank + 1) * cols // size - rank * cols // size))
            elif route is Route.FACTORS and owner == rank:
                self.take(f"share_whole{slot}", item.numel)
            if rows < cols or messages.num_runs > 1:
                self.take(f"share_product{slot}", item.held(rank))
        for short, count in counts.items():
            if count:
                self._small(count, short, _FLOAT, longest_run=2)

    def _whole_matrices(self, plan: MuonPlan) -> None:
        """What muon/executor.py and Newton-Schulz use for matrices that are whole here."""
        for stage in plan.stages:
            if stage.axis is not None:
                self.take("send", stage.local_numel)
                self.take("received", stage.size * stage.local_numel)
                self.take("whole", sum(plan.params[index].numel for index in stage.params))
            has_result = stage.axis is not None or self._device != "cpu"
            for batch in stage.batches:
                shapes = [(family.count, family.rows, family.cols) for family in batch.families]
                for number, (count, rows, cols) in enumerate(shapes):
                    for name in ("update", "result") if has_result else ("update",):
                        self.take(f"{name}{number}", count * rows * cols)
                self._iterated(shapes, batch.algorithm, plan.coefficients)

    def _iterated(self, shapes: Sequence[_Shape], algorithm: Algorithm, coefficients: Sequence[Coefficients]) -> None:
        runs = algorithm.run_lengths(coefficients)
        itemsize = _FLOAT if algorithm.dtype is FloatDtype.float32 else 2
        for chunk in self._chunks(shapes):
            short = max(min(shape[1:]) for shape in chunk)
            self._small(sum(shape[0] for shape in chunk), short, itemsize, longest_run=max(runs))
            if algorithm.num_blocks > 1:
                block = -(-short // min(algorithm.num_blocks, short))
                self.take("mirror", sum(shape[0] for shape in chunk) * block * block, itemsize)
            if itemsize != _FLOAT:
                for position, (count, rows, cols) in enumerate(chunk):
                    self.take(f"copied.{position}", count * rows * cols, itemsize)
                    self.take("product", count * rows * cols, itemsize)
            for position, (_, group) in enumerate(groupby(chunk, key=lambda shape: shape[1:])):
                numel = sum(count * rows * cols for count, rows, cols in group)
                for number in range(min(len(runs) - 1, 2)):
                    self.take(f"carry{number}.{position}", numel, itemsize)

    def _chunks(self, shapes: Sequence[_Shape]) -> Iterator[list[_Shape]]:
        """As muon/stack.py cuts them."""
        short = max(min(shape[1:]) for shape in shapes)
        is_cut = self._device == "cpu" and short >= CPU_CUT_FROM
        limit = max(
            1,
            (CPU_CACHE_BYTES * self._num_threads if is_cut else DEVICE_BYTES) // (SMALL_BUFFERS_BYTES * short * short),
        )
        chunk: list[_Shape] = []
        room = limit
        for count, rows, cols in shapes:
            while count:
                taken = min(room, count)
                chunk.append((taken, rows, cols))
                count, room = count - taken, room - taken
                if not room:
                    yield chunk
                    chunk, room = [], limit
        if chunk:
            yield chunk

    def _small(self, count: int, short: int, itemsize: int, *, longest_run: int) -> None:
        cols, names = short, ["gram", "small0", "small1", "small2"]
        if longest_run == 1:
            names = names[:2]
            if self._device == "cpu" and short * itemsize % _ALIASING_BYTES == 0:
                cols += _CACHE_LINE_BYTES // itemsize
        for name in names:
            self.take(name, count * short * cols, itemsize)
        self.take("trace", count)
        self.take("root", count)


def _slots(plan: SharePlan) -> Iterator[tuple[int, Batch]]:
    """The set of buffers that each batch uses: the first that is free, as executor.py runs them."""
    waiting, running = list(plan.batches), dict[int, int]()  # rounds left by set of buffers
    while waiting or running:
        for slot in range(_UNDER_WAY):
            if waiting and slot not in running:
                batch = waiting.pop(0)
                running[slot] = 1 + plan.kinds[batch.items[0]].runs if batch.route.has_factors else 2
                yield slot, batch
        for slot in list(running):
            running[slot] -= 1
            if not running[slot]:
                del running[slot]
