"""What a rank that fails leaves for whoever watches: in the run's folder, or if it is full beside the ranks' store."""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hp_muon_plugin.train.environment import INIT_METHOD
from hp_muon_plugin.train.run_folder import error_path

_FILE = "file://"


def leave_report(report: Mapping[str, Any], folder: Path) -> None:
    """Write why this rank ends, if there is any place for it.

    Args:
        report: Plain values; ``rank`` among them.
        folder: The run's folder. Made if rank 0 has made it on a node that this one does not see.
    """
    init_method = os.environ.get(INIT_METHOD, "")
    others = [Path(init_method.removeprefix(_FILE)).parent] if init_method.startswith(_FILE) else []
    for place in (folder, *others):
        path = error_path(place, report["rank"])
        try:
            place.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(report), encoding="utf-8")
        except OSError:  # a full disk, where an empty file is left
            with contextlib.suppress(OSError):
                path.unlink()
            continue
        return


def read_reports(*folders: Path, num_ranks: int) -> list[dict[str, Any]]:
    """What ranks have left.

    Args:
        *folders: Where to look.
        num_ranks: Ranks.

    Returns:
        Reports, without what a rank was killed over.
    """
    reports = []
    for path in (error_path(folder, rank) for folder in folders for rank in range(num_ranks)):
        with contextlib.suppress(OSError, ValueError):
            reports.append(json.loads(path.read_text(encoding="utf-8")))
    return reports
