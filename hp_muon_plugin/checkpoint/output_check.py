"""Whether the output of a conversion, read again, is its source but for what was said to be lost."""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hp_muon_plugin.checkpoint.canonical import Key, Kind, Loss
from hp_muon_plugin.checkpoint.formats.group_members import momentum_decay
from hp_muon_plugin.checkpoint.hashing import HashingSource, pieces
from hp_muon_plugin.checkpoint.verify import first_difference
from hp_muon_plugin.errors import VerifyError

_SHOWN = 5


@dataclass(slots=True)
class Report:
    """What a conversion did; ``conversion.json``.

    Attributes:
        tensors: XXH3-128 of each canonical tensor of the source by name.
        dropped: Tensors of the source that the output has not.
        changed: Tensors that the output holds in another form, with how.
        written: XXH3-128, in the output, of those.
        nbytes: Bytes of the source's tensors.
        seconds: Time it took.
        folder: Folder of the output.
        body: The rest, as written.
    """

    tensors: dict[str, str] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    changed: dict[str, str] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    nbytes: int = 0
    seconds: float = 0.0
    folder: Path = Path()
    body: dict[str, Any] = field(default_factory=dict)


def compare_output(source: HashingSource, output: HashingSource, report: Report, losses: Collection[Loss]) -> None:
    """Compare the output with the source; only what a listed loss names may be missing or another.

    Args:
        source: What was converted, all of it read.
        output: What was written.
        report: Told of each tensor.
        losses: As the user has agreed to.

    Raises:
        VerifyError: If anything else is.
    """
    infos, outputs = source.tensors(), output.tensors()
    for key, info in infos.items():
        report.tensors[str(key)] = source.digest(key)
        if key not in outputs:
            report.dropped.append(str(key))
            continue
        if outputs[key] == info and output.digest(key) == report.tensors[str(key)]:
            continue
        report.changed[str(key)] = _changed(source, output, key)
        report.written[str(key)] = output.digest(key)
    extra = [key for key in outputs if key not in infos and key.kind not in (Kind.main, Kind.weight)]
    if extra:
        raise VerifyError(f"the output holds {extra[0]}, which the source has not")
    told = {kind for loss in losses for kind in loss.kinds}
    lacking = [str(key) for key in infos if key not in outputs and key.kind not in told]
    if lacking:
        raise VerifyError(f"the output lacks {', '.join(lacking[:_SHOWN])}, and nobody said that it would")
    before, after = source.state(), output.state()
    if after.iteration != before.iteration and all(loss.has_iteration for loss in losses):
        raise VerifyError(f"the output is at iteration {after.iteration}, the source at {before.iteration}")
    passed = {name for loss in losses for name in loss.steps}
    wrong = [name for name, step in before.steps.items() if after.steps.get(name) != step and name not in passed]
    if wrong:
        raise VerifyError(f"the step count of {wrong[0]} is {after.steps.get(wrong[0])}, not {before.steps[wrong[0]]}")


def _changed(source: HashingSource, output: HashingSource, key: Key) -> str:
    """How a tensor of the output differs from the source's, if it is a change that a format may make."""
    before, after = source.tensors()[key], output.tensors()[key]
    scale = _momentum_scale(source, output, key)
    how = []
    if scale != 1.0:
        how.append(f"times {scale:.9g}")
    if before.dtype != after.dtype:
        how.append(f"{before.dtype} to {after.dtype}")
    if before.shape != after.shape:
        if before.shape[1:] != after.shape[1:] or not key.name.startswith(("embedding.", "output_layer.")):
            raise VerifyError(f"{key} has shape {after.shape} in the output, {before.shape} in the source")
        how.append(f"{before.shape[0]} to {after.shape[0]} rows of vocabulary")
    rows = min(before.shape[0], after.shape[0]) if before.shape else 1
    for start, stop in pieces(before, source.piece_bytes):
        stop = min(stop, rows)
        if start >= stop:
            break
        expected = source.read(key, start, stop)
        expected = (expected * scale if scale != 1.0 else expected).to(after.dtype)
        found = first_difference(expected, output.read(key, start, stop), start)
        if found:
            raise VerifyError(f"{key} was not written as it was read: {found}")
    if not how:
        raise VerifyError(f"{key} changed while it was converted: was the source written to meanwhile?")
    return ", ".join(how)


def _momentum_scale(source: HashingSource, output: HashingSource, key: Key) -> float:
    before, after = source.state().momentum, output.state().momentum
    decay = momentum_decay(source.state().hyper.get(key.name, {}))
    if key.kind != Kind.momentum or before is None or after is None or before == after:
        return 1.0
    if not isinstance(decay, int | float):
        return 1.0
    return 1.0 - float(decay) if after == "average" else 1.0 / (1.0 - float(decay))
