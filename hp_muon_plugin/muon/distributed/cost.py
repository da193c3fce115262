"""What a strategy costs: operations, bytes and messages, and the seconds that they take at stated rates.

All figures are per step and for the rank with most. W ranks share k matrices ``[m, n]`` (m the short
side) of B bytes each, as much of them on every rank. C is what Newton-Schulz costs; G what it costs on a Gram
matrix alone; A what it costs to form a Gram matrix, or to apply a factor (``2 m^2 n``); ``up(x)`` rounds up:

================  ===============================  ============================================
strategy          bytes received                   operations
================  ===============================  ============================================
allgather         ``k B (W-1)/W``                  ``k C`` on every rank that holds a part
dedup, updates    ``2 k B (W-1)/W``                ``up(k/W) C``
dedup, factors    ``k (B + 4 m^2) (W-1)/W``        ``up(k/W) (A + G) + k A / W``
alltoall          ``2 k B (W-1)/W^2``              ``up(k/W) C``
gram              ``2 k 4 m^2 (W-1)/W``            ``up(k/W) G + 2 k A / W``
gram, gathered    ``k (B + 2 * 4 m^2) (W-1)/W``    ``up(k/W) G + 2 k A / W``
================  ===============================  ============================================

Where items of other kinds fill up the ranks, ``up(k/W)`` is ``k/W``. Without overlap, and messages on top.
Messages of one length are as long as the longest: where a rank holds h bytes of the matrices, more than others,
``k B`` of a gather of parts is ``h W``, and half of ``alltoall`` is ``h``; where ``k`` is no multiple of W,
``k 4 m^2`` is ``up(k/W) W 4 m^2``. ``gram`` needs ranks that hold rows of tall matrices, ``X^T X`` being the sum
over their rows; ``gathered`` is for wide ones: each rank forms the Gram matrix of a stretch of columns.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hp_muon_plugin.config.choices import FloatDtype
from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.muon.algorithm import Algorithm, Form, Rule, choose
from hp_muon_plugin.muon.coefficients import Coefficients
from hp_muon_plugin.muon.distributed.items import Item
from hp_muon_plugin.muon.rates import Rates


@dataclass(frozen=True, slots=True)
class Kind:
    """How an item's matrices are orthogonalised.

    Attributes:
        flops: Of Newton-Schulz on the whole item, by the algorithm that the table chooses.
        apply_flops: Of forming Gram matrices of the whole item, and as many of applying factors to it.
        gram_flops: Of the iteration on Gram matrices alone.
        small: Elements of the factors, the sum of ``m^2``.
        runs: Runs of steps in the Gram form with float32 Gram matrices.
    """

    flops: float
    apply_flops: float
    gram_flops: float
    small: int
    runs: int


def kind_of(
    spec: ParamSpec,
    coefficients: Sequence[Coefficients],
    *,
    device: str,
    table: Sequence[Rule],
    dtype: FloatDtype | None,
) -> Kind:
    """Price one item.

    Args:
        spec: The item's.
        coefficients: Of every step.
        device: ``cpu``, ``cuda``, ``npu``.
        table: Which algorithm is fastest for which shape.
        dtype: Type of the iteration, or None for the table's.

    Returns:
        Its cost.
    """
    assert spec.view is not None
    flops, apply_flops, gram_flops, small = 0.0, 0.0, 0.0, 0
    runs = Algorithm(Form.gram).run_lengths(coefficients)
    products = sum(steps + 3 * (steps - 1) for steps in runs)
    for part in spec.view.parts:
        count, rows, cols = spec.view.part_shape(part)
        short, long = min(rows, cols), max(rows, cols)
        if not count or not short:
            continue
        algorithm = choose(device, short, long, table=table, dtype=dtype)
        flops += count * algorithm.flops(short, long, algorithm.run_lengths(coefficients))
        apply_flops += count * 2 * short**2 * long
        gram_flops += count * products * 2 * short**3
        small += count * short**2
    return Kind(flops, apply_flops, gram_flops, small, len(runs))


@dataclass(frozen=True, slots=True)
class Price:
    """Of one strategy for equal items.

    Attributes:
        bytes_received: By the busiest rank.
        flops: Of the busiest rank.
        messages: Peers or collectives.
        item_flops: Of one item on its owner: what the busiest rank has to do at least.
    """

    bytes_received: float
    flops: float
    messages: int
    item_flops: float = 0.0

    def seconds(self, rates: Rates, *, with_messages: bool = True) -> float:
        """Time without overlap.

        Args:
            rates: Of a rank.
            with_messages: Whether messages count, which items of several kinds may share.

        Returns:
            Seconds.
        """
        messages = self.messages * rates.message_s if with_messages else 0.0
        return self.bytes_received / rates.bytes_received + self.flops / rates.flops + messages


def gram_refusal(item: Item, kind: Kind, *, can_factor: bool) -> str:
    """Why Gram matrices of an item cannot be exchanged instead of its parts.

    Args:
        item: The item.
        kind: Its cost.
        can_factor: Whether factors may be exchanged.

    Returns:
        The reason, or nothing.
    """
    if not can_factor:
        return "Gram matrices are float32, and ns_dtype is not"
    if item.spec.split is not None:
        return "tensor-parallel ranks cut it too"
    if item.matrix is None:
        return "it is several matrices that are not each whole rows, or ranks' parts end inside rows"
    if not item.is_cut_between_rows:
        return "ranks' parts end inside rows"
    rows, cols = item.matrix
    return "wide matrices need all steps on one Gram matrix" if rows < cols and kind.runs > 1 else ""


def prices(
    items: Sequence[Item], size: int, kind: Kind, *, itemsize: int, can_factor: bool, has_others: bool = False
) -> dict[str, Price]:
    """Price the strategies that are possible for equal items; formulas: module docstring.

    Args:
        items: The items, at least one.
        size: Ranks.
        kind: The cost of each.
        itemsize: Bytes of an exchanged number.
        can_factor: Whether factors may be exchanged.
        has_others: Whether items of other kinds fill up ranks, so that each owns ``k / W`` of these, not rounded up.

    Returns:
        Price by name: those of ``Strategy``, with ``+factor`` or ``+gathered`` for the variants.
    """
    item, count, others = items[0], len(items), (size - 1) / size
    held = Counter[int]()
    for cuts, times in Counter(member.cuts for member in items).items():  # most are cut alike, one in each layer
        for rank, start, stop in cuts.pieces():
            held[rank] += times * (stop - start)
    longest, owned = max(held.values()), count / size if has_others else math.ceil(count / size)
    gathered, whole = longest * itemsize * (size - 1), count * item.numel * itemsize * others
    small = owned * kind.small * 4 * (size - 1)
    busiest = next(rank for rank in held if held[rank] == longest)
    everywhere = sum(member.held(busiest) > 0 for member in items)
    peers = min(size - 1, max(len(held), min(count, size)))
    found = {
        "allgather": Price(gathered, everywhere * kind.flops, 1),
        "allgather_dedup": Price(gathered + whole, owned * kind.flops, 2, kind.flops),
        "alltoall": Price(
            (owned * item.numel + longest) * itemsize * others, owned * kind.flops, 2 * peers, kind.flops
        ),
    }
    if can_factor and item.is_cut_between_rows:
        iterated, applied = owned * kind.gram_flops, kind.apply_flops * longest / item.numel
        rows, cols = item.matrix or (0, 0)
        if kind.runs == 1:
            factored = owned * kind.apply_flops + iterated + applied
            at_least = kind.apply_flops + kind.gram_flops
            found["allgather_dedup+factor"] = Price(gathered + small, factored, 2, at_least)
        if kind.runs == 1 and rows < cols:
            formed = count * kind.apply_flops / size
            found["gram+gathered"] = Price(gathered + 2 * small, iterated + formed + applied, 4, kind.gram_flops)
        if rows >= cols:
            computed = iterated + 2 * applied * kind.runs
            found["gram"] = Price(2 * small * kind.runs, computed, 3 * kind.runs, kind.gram_flops)
    return found
