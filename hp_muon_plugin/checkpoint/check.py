"""Whether a checkpoint is what was written: hashes of files and tensors, coverage, masters against weights."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from hp_muon_plugin.checkpoint.canonical import Key, Source
from hp_muon_plugin.checkpoint.convert import REPORT
from hp_muon_plugin.checkpoint.hashing import HashingSource, compare_rest
from hp_muon_plugin.checkpoint.progress import Progress
from hp_muon_plugin.checkpoint.verify import masters
from hp_muon_plugin.errors import CheckpointError, DamageError

_BUDGET = 2**30


def verified(source: Source, progress: Progress) -> tuple[list[str], list[str]]:
    """Check a checkpoint as far as it can be.

    Args:
        source: Opened, which has checked that every element lies in a file.
        progress: Told how far it is.

    Returns:
        Problems, and what was checked, both in words.
    """
    infos = source.tensors()
    checks = [f"{len(infos)} tensors are complete"]
    problems = [*getattr(source, "file_problems", list)()]
    if hasattr(source, "file_problems"):
        checks.append("files have the hashes of the manifest")
    written = _written(source)
    progress.begin("verify", sum(info.nbytes for info in infos.values()))
    hashed = HashingSource(source, _BUDGET)

    def tried(work: Callable[[], list[str]]) -> list[str]:
        try:
            return work()
        except CheckpointError as error:
            return [str(error)]

    def of_tensor(key: Key) -> list[str]:
        digest = hashed.digest(key)  # every element is read, so that its checksum in the file is compared
        if str(key) in written and digest != written[str(key)]:
            return [f"{source.path}: {key} is not what was converted: its hash differs from {REPORT}"]
        return []

    def rest() -> list[str]:
        compare_rest(source)
        return []

    problems += tried(lambda: [f"{source.path}: {found}" for found in masters(hashed)])
    for key, info in infos.items():
        problems += tried(partial(of_tensor, key))
        progress.advance(info.nbytes)
    problems = list(dict.fromkeys(problems + tried(rest)))
    checks.append("tensors have the checksums of their files, where those have any")
    if any(key.kind == "main" for key in infos):
        checks.append("masters round to the stored weights")
    if written:
        checks.append(f"{len(written)} tensors have the hashes of {REPORT}")
    return problems, checks


def _written(source: Source) -> dict[str, str]:
    """Hashes that a conversion left, of all tensors that it wrote."""
    try:
        report: Any = json.loads((source.path / REPORT).read_text(encoding="utf-8"))
        hashes, changed = dict(report["xxh3_128"]), set(report["changed"])
        written = dict(report.get("xxh3_128_of_changed", {}))  # which reports of before 2026-12 have not
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamageError(f"{source.path / REPORT} is damaged: {error}") from error
    return {name: digest for name, digest in hashes.items() if name not in changed} | written
