"""Bytes of the buffers that a rank's Muon step keeps, from its plan alone. No torch.

Buffers have names, and each is as large as its largest use (:class:`~hp_muon_plugin.muon.workspace.Workspace`).
Here the same names are asked for in the same sizes. A test compares the sum with that of real steps, with every
way of tensor-parallel matrices too.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from hp_muon_plugin.config.choices import FloatDtype
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.muon.algorithm import Algorithm, is_gathered
from hp_muon_plugin.muon.coefficients import Coefficients
from hp_muon_plugin.muon.distributed.messages import Messages, side
from hp_muon_plugin.muon.distributed.plan import UNDER_WAY, Batch, Route, SharePlan
from hp_muon_plugin.muon.distributed.replica_plan import ReplicaPlan
from hp_muon_plugin.muon.limits import chunk_limit
from hp_muon_plugin.muon.pieces import Way
from hp_muon_plugin.muon.plan import MuonPlan, build_plan
from hp_muon_plugin.muon.stage import Stage

_ALIASING_BYTES, _CACHE_LINE_BYTES = 512, 64  # as in workspace.py
_FLOAT = 4
_HALF = 2
_Shape = tuple[int, int, int]


class Footprint:
    """Buffers of one rank.

    Args:
        config: Options.
        device: ``cpu``, ``cuda`` or ``npu``.
        num_threads: Of the CPU, by which chunks of matrices are cut.
        places: The rank's place on tensor-parallel axes by name; 0 on those that are left out.
    """

    def __init__(
        self, config: HpMuon, device: str, *, num_threads: int = 1, places: Mapping[str, int] | None = None
    ) -> None:
        self._config, self._device, self._num_threads = config, device, num_threads
        self._places = dict(places or {})
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
        self.add_matrices(local)
        for slot, batch in _slots(plan):
            messages = Messages(plan, batch)
            self._look_ahead(messages, rank)
            if batch.route.has_factors:
                self._factored(messages, rank, slot)
            else:
                self._whole(messages, rank, slot)

    def add_replicas(self, plan: ReplicaPlan, place: int, *, itemsize: int = _FLOAT) -> None:
        """Use what the step over weights uses that all ranks of an axis hold.

        Args:
            plan: Their plan.
            place: This rank's place on the axis.
            itemsize: Bytes of an element of the weights that are sent.
        """
        self.add_matrices(build_plan([item.spec for item in plan.updated(place)], self._config, device=self._device))
        self.add_sent(dict(enumerate(plan.packed_numels)), itemsize=itemsize)

    def add_sent(self, numels: Mapping[int, int], *, itemsize: int = _FLOAT) -> None:
        """Use what new weights take that ranks send each other which hold the same ones.

        Args:
            numels: Elements that share a message, by the place of who sends them.
            itemsize: Bytes of an element.
        """
        for owner, numel in numels.items():
            if numel:
                self.take(f"share_weights{owner}", numel, itemsize)

    def _look_ahead(self, messages: Messages, rank: int) -> None:
        """A rank's part is written in the type of messages, or in float32 if it stays; gradients are float32."""
        has_other = self._config.momentum_dtype is not FloatDtype.float32
        for _, item, owner in messages.items:
            is_sent = messages.batch.route.gathers and not messages.batch.route.has_factors
            is_sent = is_sent or (messages.batch.route is Route.OWNER and owner != rank)
            if self._config.nesterov and (has_other or (is_sent and messages.plan.itemsize != _FLOAT)):
                self.take("share_look_ahead", item.held(rank))

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
        self.add_matrices(build_plan([item.spec for item in mine], self._config, device=self._device))

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
                self.take(f"share_largest{slot}", 1)
            if rows < cols or messages.num_runs > 1:
                self.take(f"share_product{slot}", item.held(rank))
        for short, count in counts.items():
            if count:
                self._small(count, short, _FLOAT, has_one_step=False, is_padded=False)

    def add_matrices(self, plan: MuonPlan) -> None:
        """Use what muon/executor.py and Newton-Schulz use for matrices that no shard axis cuts.

        Args:
            plan: Their plan.
        """
        for stage in plan.stages:
            place = self._places.get(stage.axis, 0) if stage.axis else 0
            if stage.axis is not None and stage.way is Way.gram:
                self._summed(stage)
                continue
            if stage.axis is not None:
                self._made_whole(plan, stage, place)
            has_result = stage.axis is not None or self._device != "cpu"
            for batch in stage.batches_of(place):
                shapes = [(family.count, family.rows, family.cols) for family in batch.families]
                for number, (count, rows, cols) in enumerate(shapes):
                    for name in ("update", "result") if has_result else ("update",):
                        self.take(f"{name}{number}", count * rows * cols)
                is_apart = stage.axis is not None or self._device == "cpu"  # a target for each part, or one for all
                counts = [[part.count for part in f.parts] if is_apart else [f.count] for f in batch.families]
                self._iterated(shapes, batch.algorithm, plan.coefficients)
                if batch.algorithm.dtype is not FloatDtype.float32:
                    self._last_products(shapes, counts)

    def _made_whole(self, plan: MuonPlan, stage: Stage, place: int) -> None:
        """As muon/gathered.py: slices of all pieces go out, those of the rank's pieces come in."""
        owners = stage.owners or (place,) * len(stage.pieces)
        mine = [plan.pieces[i].spec for i, owner in zip(stage.pieces, owners, strict=True) if owner == place]
        self.take("send", stage.local_numel)
        self.take("received", stage.size * sum(spec.local_numel for spec in mine))
        self.take("whole", sum(spec.numel for spec in mine))

    def _summed(self, stage: Stage) -> None:
        """As muon/summed.py: slices stay, Gram matrices and exponents travel."""
        count = sum(batch.count for batch in stage.batches)
        self.take("gram_message", sum(batch.count * batch.short**2 for batch in stage.batches))
        self.take("exponents", count)
        self.take("all_exponents", stage.size * count)
        for number, batch in enumerate(stage.batches):
            for place, family in enumerate(batch.families):
                for turn in range(2):
                    self.take(f"slices{number}.{place}.{turn}", family.count * family.rows * family.cols)
            self._small(batch.count, batch.short, _FLOAT, has_one_step=False, is_padded=False)
            self._mirror(batch.algorithm, batch.count, batch.short, _FLOAT)

    def _iterated(self, shapes: Sequence[_Shape], algorithm: Algorithm, coefficients: Sequence[Coefficients]) -> None:
        runs = algorithm.run_lengths(coefficients)
        itemsize = _FLOAT if algorithm.dtype is FloatDtype.float32 else _HALF
        blocks = algorithm.blocks(self._num_threads)
        if itemsize != _FLOAT and blocks > 1 and self._device == "cpu":
            # tall ones are read as wide ones
            shapes = [(count, min(rows, cols), max(rows, cols)) for count, rows, cols in shapes]
        for chunk in self._chunks(shapes, itemsize):
            count, short = sum(shape[0] for shape in chunk), max(min(shape[1:]) for shape in chunk)
            is_padded = max(runs) == 1 and blocks > 1 and itemsize == _FLOAT
            self._small(count, short, itemsize, has_one_step=max(runs) == 1, is_padded=is_padded)
            if algorithm.dtype is FloatDtype.bfloat16 and self._device == "cpu":
                self.take("widened", count * short * short)
            is_one_by_one = itemsize != _FLOAT and self._device == "cpu"
            self._mirror(algorithm, 1 if is_one_by_one else count, short, itemsize)
            if itemsize != _FLOAT:
                for position, shape in enumerate(chunk):
                    self.take(f"copied.{position}", math.prod(shape), itemsize)
            groups = [(shape, list(group)) for shape, group in groupby(chunk, key=lambda shape: shape[1:])]
            takes_turns = 1 < len(runs) == sum(runs) and len(groups) == 1 and len(set(groups[0][0])) == 1
            if takes_turns:
                self.take("another", count * short * self._padded(short, itemsize, is_padded=is_padded), itemsize)
            for position, (shape, group) in enumerate(groups):
                numel = sum(math.prod(one) for one in group)
                for number in range(0 if takes_turns else min(len(runs) - 1, 2)):
                    self.take(f"carry{number}.{position}", numel, itemsize)
                if len(runs) > 2 and is_gathered(self._device, *shape, num_threads=self._num_threads):
                    self.take(f"carry1.{position}", numel, itemsize)

    def _last_products(self, shapes: Sequence[_Shape], counts: Sequence[list[int]]) -> None:
        """The matrices of one target that are in one chunk: their type is another than the target's."""
        left = [count for parts in counts for count in parts if count]
        for chunk in self._chunks(shapes, _HALF):
            for number, rows, cols in chunk:
                taken = number
                while taken:
                    written = min(taken, left[0])
                    self.take("product", written * rows * cols, _HALF)
                    taken, left[0] = taken - written, left[0] - written
                    if not left[0]:
                        left.pop(0)

    def _chunks(self, shapes: Sequence[_Shape], itemsize: int) -> Iterator[list[_Shape]]:
        """As muon/stack.py cuts them."""
        short = max(min(shape[1:]) for shape in shapes)
        limit = chunk_limit(self._device, short, itemsize=itemsize, num_threads=self._num_threads)
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

    def _small(self, count: int, short: int, itemsize: int, *, has_one_step: bool, is_padded: bool) -> None:
        cols = self._padded(short, itemsize, is_padded=is_padded)
        for name in ("gram", "small0") if has_one_step else ("gram", "small0", "small1", "small2"):
            self.take(name, count * short * cols, itemsize)
        self.take("trace", count)
        self.take("root", count)

    def _mirror(self, algorithm: Algorithm, count: int, short: int, itemsize: int) -> None:
        blocks = algorithm.blocks(self._num_threads)
        if blocks > 1:
            block = -(-short // min(blocks, short))
            self.take("mirror", count * block * block, itemsize)

    def _padded(self, short: int, itemsize: int, *, is_padded: bool) -> int:
        is_aliased = is_padded and self._device == "cpu" and short * itemsize % _ALIASING_BYTES == 0
        return short + (_CACHE_LINE_BYTES // itemsize if is_aliased else 0)


def _slots(plan: SharePlan) -> Iterator[tuple[int, Batch]]:
    """The set of buffers that each batch uses: the first that is free, as executor.py runs them."""
    waiting, running = list(plan.batches), dict[int, int]()  # rounds left by set of buffers
    while waiting or running:
        for slot in range(UNDER_WAY):
            if waiting and slot not in running:
                batch = waiting.pop(0)
                running[slot] = 1 + plan.kinds[batch.items[0]].runs if batch.route.has_factors else 2
                yield slot, batch
        for slot in list(running):
            running[slot] -= 1
            if not running[slot]:
                del running[slot]
