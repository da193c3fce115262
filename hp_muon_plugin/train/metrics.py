"""Where metrics go: JSON lines, TensorBoard, Weights & Biases. Rank 0 only."""

import importlib.util
import json
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hp_muon_plugin.config.trainer import Logger
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.train.run_folder import METRICS, TENSORBOARD

logger = logging.getLogger(__name__)

Metrics = Mapping[str, float | int | str | None]


class Sink(Protocol):
    """One place that takes metrics."""

    def write(self, step: int, metrics: Metrics) -> None:
        """Take the metrics of one step."""

    def close(self) -> None:
        """Write out what is buffered."""


class JsonLines:
    """One JSON object per line, flushed at once, so that a killed run keeps its log.

    JSON has no NaN and no infinity: such a value is ``null``.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self._began = time.time()

    def write(self, step: int, metrics: Metrics) -> None:
        """Append a line with the step and the seconds since the start."""
        line = {"step": step, "elapsed_s": round(time.time() - self._began, 3), **metrics}
        finite = {name: None if _is_no_json(value) else value for name, value in line.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _is_no_json(value: float | int | str | None) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


class TensorBoard:
    """TensorBoard events."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def write(self, step: int, metrics: Metrics) -> None:
        """Add the numbers as scalars."""
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WeightsAndBiases:
    """Weights & Biases."""

    def __init__(self, project: str, name: str, config: dict[str, Any], folder: Path) -> None:
        import wandb

        self._run = wandb.init(project=project, name=name, config=config, dir=str(folder))

    def write(self, step: int, metrics: Metrics) -> None:
        """Send the metrics."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MetricLog:
    """All sinks together.

    Args:
        config: Which sinks.
        folder: The run's folder.
        name: The run's name.
        run_config: The whole configuration, for sinks that keep it.
    """

    def __init__(self, config: Logger, folder: Path, *, name: str, run_config: dict[str, Any]) -> None:
        self._sinks: list[Sink] = []
        if config.jsonl:
            self._sinks.append(JsonLines(folder / METRICS))
        if config.tensorboard or (config.tensorboard is None and has_tensorboard()):
            self._sinks.append(TensorBoard(folder / TENSORBOARD))
        elif config.tensorboard is None:
            logger.warning(
                "tensorboard is not installed, so no events are written; pip install 'hp_muon_plugin[log]', "
                "or set logger.tensorboard=false"
            )
        if config.wandb:
            self._sinks.append(WeightsAndBiases(config.wandb_project, name, run_config, folder))

    def write(self, step: int, metrics: Metrics) -> None:
        """Send the metrics of one step everywhere.

        Args:
            step: Optimizer steps done.
            metrics: Values by name.
        """
        for sink in self._sinks:
            sink.write(step, metrics)

    def close(self) -> None:
        """Close all sinks."""
        for sink in self._sinks:
            sink.close()


def has_tensorboard() -> bool:
    """Whether TensorBoard events can be written here."""
    return importlib.util.find_spec("tensorboard") is not None


def check_logger(config: Logger) -> list[ConfigError]:
    """Whether the packages of the chosen sinks are installed.

    Args:
        config: Options.

    Returns:
        One error for each that is missing.
    """
    return [
        ConfigError(
            f"logger.{name}",
            True,
            f"the package {name} is not installed",
            f"pip install 'hp_muon_plugin[log]', or set logger.{name}=false",
        )
        for name in ("tensorboard", "wandb")
        if getattr(config, name) and importlib.util.find_spec(name) is None
    ]
