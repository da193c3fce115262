"""The routing table: every parameter, who updates it, why, and what state it keeps.

Equal rows of different layers and experts are folded into one line with a count.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.layout.spec import MatrixView
from hp_muon_plugin.muon.routing import Algorithm, Route, route_parameters

if TYPE_CHECKING:  # tables are also made where torch is not
    from hp_muon_plugin.muon.baseline import BaselineAdamW
    from hp_muon_plugin.muon.optimizer import HpMuonOptimizer

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class TableRow:
    """One line of the table.

    Attributes:
        pattern: Name with ``*`` for layer and expert numbers that differ.
        count: Parameters on this line.
        shape: Shape of the whole parameter.
        algorithm: Who updates it.
        matrices: What Newton-Schulz sees, for example ``q 64x128, k 32x128``.
        state_bytes: Optimizer state of all parameters on this line, on this rank.
        reason: Why this route.
    """

    pattern: str
    count: int
    shape: tuple[int, ...]
    algorithm: Algorithm
    matrices: str
    state_bytes: int
    reason: str


def table_rows(routes: Sequence[Route], config: HpMuon | AdamW) -> list[TableRow]:
    """Fold routes into lines.

    Args:
        routes: One per parameter.
        config: Options.

    Returns:
        Lines in the order in which parameters first appear.
    """
    folded: dict[tuple[object, ...], list[Route]] = {}
    for route in routes:
        spec = route.spec
        key = (_NUMBER.sub("*", spec.name), spec.shape, route.algorithm, route.reason, _matrices(route))
        folded.setdefault(key, []).append(route)
    return [_row(members, config) for members in folded.values()]


def format_table(rows: Iterable[TableRow]) -> str:
    """The table as plain text with a line of totals.

    Args:
        rows: Lines.

    Returns:
        Text without a final newline.
    """
    rows = list(rows)
    header = ("parameter", "count", "shape", "route", "matrices", "state MiB", "why")
    cells = [header] + [
        (
            row.pattern,
            str(row.count),
            "x".join(map(str, row.shape)),
            str(row.algorithm),
            row.matrices,
            f"{row.state_bytes / 2**20:.3f}",
            row.reason,
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    muon = sum(row.state_bytes for row in rows if row.algorithm is Algorithm.muon)
    adamw = sum(row.state_bytes for row in rows if row.algorithm is Algorithm.adamw)
    count = {name: sum(row.count for row in rows if row.algorithm is name) for name in Algorithm}
    lines.append(
        f"muon={count[Algorithm.muon]} parameters, {muon / 2**20:.3f} MiB of state; "
        f"adamw={count[Algorithm.adamw]} parameters, {adamw / 2**20:.3f} MiB of state; "
        f"frozen={count[Algorithm.frozen]}"
    )
    return "\n".join(lines)


def routing_table(optimizer: "HpMuonOptimizer | BaselineAdamW") -> str:
    """The table of a built optimizer.

    Args:
        optimizer: From :func:`hp_muon_plugin.muon.build_optimizer` or ``build_adamw``.

    Returns:
        Text.
    """
    config, specs = optimizer.config, list(optimizer.specs.values())
    if isinstance(config, HpMuon):
        routes = route_parameters(specs, muon_params=config.muon_params, adamw_params=config.adamw_params)
        return format_table(table_rows(routes, config))
    routes = tuple(
        Route(spec, Algorithm.adamw, "optimizer=adamw") if spec.trainable else Route(spec, Algorithm.frozen, "frozen")
        for spec in specs
    )
    return format_table(table_rows(routes, config))


def _matrices(route: Route) -> str:
    is_muon = route.algorithm is Algorithm.muon and route.spec.view is not None
    return matrices_text(route.spec.view) if is_muon else ""


def matrices_text(view: MatrixView | None) -> str:
    """What Newton-Schulz sees of a parameter.

    Args:
        view: How it reads as matrices.

    Returns:
        For example ``q [64,128] k [32,128]``.
    """
    pieces = []
    for part in view.parts if view else ():
        assert view is not None
        count, rows, cols = view.part_shape(part)
        label = f"{part.label} " if part.label else ""
        pieces.append(f"{label}{f'{count}x' if count > 1 else ''}[{rows},{cols}]")
    return " ".join(pieces)


def _row(members: Sequence[Route], config: HpMuon | AdamW) -> TableRow:
    first = members[0]
    names = [route.spec.name for route in members]
    pattern = _NUMBER.sub("*", names[0]) if len(set(names)) > 1 else names[0]
    return TableRow(
        pattern,
        len(members),
        first.spec.shape,
        first.algorithm,
        _matrices(first),
        sum(_state_bytes(route, config) for route in members),
        first.reason,
    )


def _state_bytes(route: Route, config: HpMuon | AdamW) -> int:
    if route.algorithm is Algorithm.muon and isinstance(config, HpMuon):
        return _BYTES[config.momentum_dtype] * route.spec.local_numel
    return 8 * route.spec.local_numel + 4 if route.algorithm is Algorithm.adamw else 0
