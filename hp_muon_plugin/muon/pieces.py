"""Which way each parameter goes in a step: a piece is a parameter, or a part of it that goes its own way."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from hp_muon_plugin.config.choices import TensorParallelMode
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.layout.cut import Cut, LocalView, local_part_spec, local_view, whole_part_spec
from hp_muon_plugin.layout.spec import MatrixView, ParamSpec
from hp_muon_plugin.muon.algorithm import Rule, choose
from hp_muon_plugin.muon.batches import FLOAT_BYTES, PlannedPart, gram_algorithm
from hp_muon_plugin.muon.coefficients import Coefficients
from hp_muon_plugin.muon.rates import Rates
from hp_muon_plugin.muon.scale import update_scale

# Below this side, one direction that a float32 Gram matrix loses is too large a part of the result;
# the table of algorithms takes the standard form there, which reads the matrix at every step.
_LEAST_GRAM_SIDE = 12
_FLOAT32_COSTS_ELSEWHERE = 8.0  # of a float32 operation in half-precision ones


class Way(StrEnum):
    """How the matrices of a stage come to be orthogonalised."""

    local = "local"
    gather = "gather"
    gram = "gram"
    owner = "owner"
    blockwise = "blockwise"


@dataclass(frozen=True, slots=True)
class Piece:
    """A parameter, or one part of it.

    Attributes:
        param: Index into ``MuonPlan.params``.
        spec: What the stage works on: whole and cut over the axis for ``gather`` and ``owner``, this
            rank's share for the others.
        way: How.
        why: Why this way, where the mode alone does not say.
        view: How the rank's elements of the parameter read as matrices, where only one part is meant.
        part: That part.
        cut: Side of the matrices that ranks divide and do not gather (``gram``).
        num_slices: Ranks that divide it.
        axis: Their axis; None without communication.
    """

    param: int
    spec: ParamSpec
    way: Way
    why: str = ""
    view: MatrixView | None = None
    part: int | None = None
    cut: Cut = Cut.none
    num_slices: int = 1
    axis: str | None = None

    def planned_parts(self, index: int, config: HpMuon) -> list[PlannedPart]:
        """The matrices in it.

        Args:
            index: Number of this piece in the plan.
            config: Options.

        Returns:
            One entry for each part that has elements.
        """
        view = self.spec.view
        assert view is not None, self.spec
        planned = []
        for number, part in enumerate(view.parts):
            count, rows, cols = view.part_shape(part)
            if count and rows and cols:
                logical = rows, cols
                if self.cut is not Cut.none:
                    is_rows = self.cut is Cut.rows
                    logical = (rows * self.num_slices, cols) if is_rows else (rows, cols * self.num_slices)
                scale = update_scale(config.scale, *logical, factor=config.scale_factor)
                planned.append(PlannedPart(index, number, count, rows, cols, scale, self.cut))
        return planned


@dataclass(frozen=True, slots=True)
class Router:
    """Decides for one plan.

    Attributes:
        mode: What cut matrices do.
        device: ``cpu``, ``cuda`` or ``npu``.
        table: Which algorithm is fastest for which shape.
        coefficients: Newton-Schulz coefficients of every step.
        rates: By which two exact ways are compared for matrices that are cut along their short side.
    """

    mode: TensorParallelMode
    device: str
    table: Sequence[Rule]
    coefficients: Sequence[Coefficients]
    rates: Rates

    def pieces(self, param: int, spec: ParamSpec) -> list[Piece]:
        """Divide one parameter.

        Args:
            param: Its index.
            spec: Its spec.

        Returns:
            Its pieces; together they hold every element once.
        """
        if spec.split is None:
            return [Piece(param, spec, Way.local)]
        if spec.split.size == 1:
            return [Piece(param, replace(spec, split=None), Way.local)]
        local = local_view(spec)
        if local is None:
            is_owned = self.mode is TensorParallelMode.owner
            why = "" if is_owned else "ranks hold unequal shares of its matrices"
            return [self._whole(param, spec, Way.owner if is_owned else Way.gather, why)]
        own = replace(spec, shape=local.view.factors, view=local.view, split=None)
        if all(cut is Cut.none for cut in local.cuts):
            return [Piece(param, own, Way.local, "each rank holds whole matrices")]
        match self.mode:
            case TensorParallelMode.blockwise:
                return [Piece(param, own, Way.blockwise)]
            case TensorParallelMode.owner:
                return [self._whole(param, spec, Way.owner)]
            case TensorParallelMode.distributed:
                return [self._part(param, spec, local, index) for index in range(len(local.cuts))]
        return [self._whole(param, spec, Way.gather)]

    def _whole(self, param: int, spec: ParamSpec, way: Way, why: str = "") -> Piece:
        assert spec.split is not None
        return Piece(param, spec, way, why, num_slices=spec.split.size, axis=spec.split.axis)

    def _part(self, param: int, spec: ParamSpec, local: LocalView, index: int) -> Piece:
        """One part under ``distributed``."""
        assert spec.split is not None
        cut, split = local.cuts[index], spec.split
        own, whole = local_part_spec(spec, local, index), whole_part_spec(spec, local, index)
        if cut is Cut.none:
            return Piece(param, own, Way.local, "each rank holds whole matrices", local.view, index)
        _, rows, cols = local.whole.part_shape(local.whole.parts[index])
        held, divided = (cols, rows) if cut is Cut.rows else (rows, cols)
        refusal = self._refusal(held, divided, split.size)
        if refusal:
            return Piece(param, whole, Way.gather, refusal, local.view, index, num_slices=split.size, axis=split.axis)
        why = "" if held <= divided else f"gram matrices of the long side ({held}) cost less than a gather"
        return Piece(param, own, Way.gram, why, local.view, index, cut, split.size, split.axis)

    def _refusal(self, held: int, divided: int, size: int) -> str:
        """Why matrices are gathered although Gram matrices of the uncut side would add up, or nothing."""
        short, long = min(held, divided), max(held, divided)
        if short < _LEAST_GRAM_SIDE:
            return f"short side {short} is below {_LEAST_GRAM_SIDE}"
        if held <= divided:
            return ""
        gram, found = gram_algorithm(self.device, held, self.table), choose(self.device, short, long, table=self.table)
        runs = gram.run_lengths(self.coefficients)
        float32 = 1.0 if self.device == "cpu" else _FLOAT32_COSTS_ELSEWHERE
        per_byte = self.rates.flops / self.rates.bytes_received
        weight = float32 if found.dtype == gram.dtype else 1.0
        gather_cost = weight * found.flops(short, long, found.run_lengths(self.coefficients))
        gather_cost += per_byte * FLOAT_BYTES * held * divided * (size - 1) / size
        gram_cost = float32 * gram.flops(held, divided // size, runs)
        gram_cost += per_byte * 2 * FLOAT_BYTES * len(runs) * held**2 * (size - 1) / size
        if gram_cost < gather_cost:
            return ""
        ratio = gram_cost / gather_cost
        return (
            f"cut along the short side ({divided}): gram matrices of side {held} would cost {ratio:.1f} times as much"
        )
