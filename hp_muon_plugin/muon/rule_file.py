"""Tables of algorithms as files: what calibration writes and ``optimizer.ns_table`` names."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hp_muon_plugin.config.choices import FloatDtype
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.muon.algorithm import TABLE, Algorithm, Form, Rule

_FIX = "write one with hp-muon bench newton-schulz --calibrate FILE, or leave it out"


def load_table(path: Path) -> tuple[Rule, ...]:
    """Read a table that calibration wrote; rows for other devices keep their defaults.

    Args:
        path: A JSON file.

    Returns:
        The rows of the file before the built-in ones.

    Raises:
        ConfigError: If there is no such file, or it holds no table.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        read = [_read_rule(row) for row in rows]
    except FileNotFoundError:
        raise ConfigError("optimizer.ns_table", path, "there is no such file", _FIX) from None
    except (ValueError, KeyError, TypeError, IndexError) as error:
        why = f"is no table of algorithms ({type(error).__name__}: {error})"
        raise ConfigError("optimizer.ns_table", path, why, _FIX) from None
    return (*read, *TABLE)


def _read_rule(row: dict[str, Any]) -> Rule:
    told = row["algorithm"]
    algorithm = Algorithm(
        Form(told["form"]),
        int(told["num_blocks"]),
        FloatDtype(told["dtype"]),
        bool(told.get("has_kernel", False)),
        int(told.get("shared_blocks", 0)),
    )
    asked = row.get("asked")
    return Rule(
        str(row["device"]),
        int(row["short_below"]),
        float(row["aspect_from"]),
        algorithm,
        None if asked is None else FloatDtype(asked),
    )


def save_table(rules: Sequence[Rule], path: Path, *, note: str) -> None:
    """Write measured rows.

    Args:
        rules: Rows of one device.
        path: JSON file to write.
        note: Where and with what they were measured.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"note": note, "rows": [asdict(rule) for rule in rules]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
