"""Plans, reports and tables of checkpoints as text."""

import re
from collections.abc import Iterator
from typing import Any

from hp_muon_plugin.checkpoint.canonical import Info, Kind, Source
from hp_muon_plugin.checkpoint.convert import Plan
from hp_muon_plugin.checkpoint.output_check import Report

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_INDEX = re.compile(r"(?<=\[)\d+(, \d+)*(?=\]$)")  # in a stack of layers or experts
_MODEL_SHOWN = ("layers", "sharding", "tied")


def plan_lines(found: Plan, *, collapsed: bool) -> Iterator[str]:
    """Every tensor of the source with where it comes from and where it goes, then what is lost.

    Args:
        found: The plan.
        collapsed: Whether layers and experts that go alike share a line.
    """
    source, writer = found.source, found.writer
    came = getattr(source, "sources", str)
    where = getattr(writer, "where", None)
    goes = where(source, found.target) if where else {key: str(key) for key in source.tensors()}
    yield f"{source.path} ({source.format}) -> {found.to}: {len(source.tensors())} tensors, {_size(found.nbytes)}"
    alike: dict[str, list[str]] = {}
    for key in source.tensors():
        both = came(key), goes.get(key) or "lost"
        pattern = [_INDEX.sub("*", _NUMBER.sub("*", text)) if collapsed else text for text in both]
        alike.setdefault(f"  {' -> '.join(pattern)}", []).append(f"  {' -> '.join(both)}")
    for line, lines in alike.items():
        yield lines[0] if len(lines) == 1 else f"{line} ({len(lines)})"
    yield from (f"lost: {line}" for line in found.losses)
    if found.losses:
        yield "the conversion needs --drop"


def report_lines(found: Plan, report: Report) -> Iterator[str]:
    """What was done.

    Args:
        found: The plan.
        report: Of the conversion.
    """
    rate = report.nbytes / max(report.seconds, 1e-9)
    yield (
        f"{report.folder}: {len(report.tensors) - len(report.dropped)} tensors, {_size(report.nbytes)} in "
        f"{report.seconds:.1f} s ({_size(rate)}/s), read again and verified"
    )
    for line in found.losses:
        yield f"  lost: {line}"
    for key, how in list(report.changed.items())[:5]:
        yield f"  changed: {key}: {how}"
    if len(report.changed) > 5:
        yield f"  changed: {len(report.changed) - 5} more, see conversion.json"


def inspected(source: Source) -> dict[str, Any]:
    """Everything about a checkpoint but its tensors' values, for ``--json``.

    Args:
        source: The opened checkpoint.
    """
    state = source.state()
    return {
        "path": str(source.path),
        "format": source.format,
        "iteration": state.iteration,
        "consumed_samples": state.consumed_samples,
        "momentum": state.momentum and str(state.momentum),
        "vocab_size": state.vocab_size,
        "scheduler": state.scheduler,
        "model": state.model,
        "random": sorted(state.random),
        "steps": state.steps,
        "hyper": state.hyper,
        "tensors": {
            str(key): {"shape": list(info.shape), "dtype": _dtype(info)} for key, info in source.tensors().items()
        },
    }


def inspected_lines(source: Source, *, collapsed: bool) -> Iterator[str]:
    """A table of a checkpoint.

    Args:
        source: The opened checkpoint.
        collapsed: Whether layers and experts that are alike share a row.
    """
    state = source.state()
    total = sum(info.nbytes for info in source.tensors().values())
    yield f"{source.path}"
    yield f"  format {source.format}, iteration {state.iteration}, {len(source.tensors())} tensors, {_size(total)}"
    steps = sorted(set(state.steps.values()))
    facts = {
        "samples": state.consumed_samples,
        "vocabulary": state.vocab_size,
        "optimizer steps": ", ".join(f"{step:g}" for step in steps) or None,
        "momentum": state.momentum,
        "random states": len(state.random) or None,
        **{name: state.model.get(name) for name in _MODEL_SHOWN},
    }
    yield "  " + ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
    rows = list(_rows(source, collapsed))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, (*widths, 0), strict=True)).rstrip()


def _rows(source: Source, collapsed: bool) -> Iterator[tuple[str, str, str, str]]:
    by_name: dict[str, dict[str, Info]] = {}
    for key, info in source.tensors().items():
        by_name.setdefault(key.name, {})[key.kind] = info
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name, kinds in by_name.items():
        pattern = _NUMBER.sub("*", name) if collapsed else name
        alike.setdefault((pattern, *sorted(kinds.items())), []).append(name)
    yield "name", "shape", "dtype", "state"
    for (pattern, *_), names in alike.items():
        kinds = by_name[names[0]]
        first = kinds.get(Kind.weight) or kinds.get(Kind.buffer) or next(iter(kinds.values()))
        state = ", ".join(f"{kind} {_dtype(info)}" for kind, info in kinds.items() if info is not first)
        shown = pattern if len(names) == 1 else f"{pattern} ({len(names)})"
        yield names[0] if len(names) == 1 else shown, str(list(first.shape)), _dtype(first), state


def _dtype(info: Info) -> str:
    return str(info.dtype).removeprefix("torch.")


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"
