import io
import json
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from hp_muon_plugin.config.trainer import Logger
from hp_muon_plugin.train.metrics import MetricLog, check_logger
from hp_muon_plugin.train.progress import Bar, Lines, Silent, make_display, tidy_terminal

VALUES = "loss 2.3456  12,345 tokens/s  optimizer 12.3 ms  1,234 MiB"


def test_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    lines = Lines(100, stream)
    lines.update(1, "loss 3", is_logged=True)
    lines.update(2, "loss 2", is_logged=False)
    lines.update(10, "loss 1", is_logged=True)
    assert stream.getvalue() == "step   1/100  loss 3\nstep  10/100  loss 1\n"


def drawn(width: int, values: str) -> str:
    stream = io.StringIO()
    bar = Bar(200, Console(file=stream, width=width, force_terminal=True, color_system=None))
    bar.update(150, values, is_logged=True)
    bar.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    return shown.rstrip("\n").rpartition("\n")[2].rpartition("\r")[2]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_step_and_remaining_time_are_shown_at_every_width(width: int) -> None:
    """At 80 columns the metrics pushed both off the line."""
    text = drawn(width, VALUES)
    assert len(text) <= width
    assert "150/200 -:--:-- loss 2.34" in text
    assert (VALUES in text) == (width >= 80)


def test_what_looks_like_markup_is_text() -> None:
    assert "[red]x[/nope]" in drawn(80, "[red]x[/nope]")


def test_only_the_first_rank_shows_anything() -> None:
    assert isinstance(make_display(3, is_first_rank=False), Silent)
    assert isinstance(make_display(3, is_first_rank=True), Lines)  # pytest's output is no terminal


def test_a_terminal_is_left_with_a_cursor_and_a_free_line() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, file = Terminal(), io.StringIO()
    tidy_terminal(terminal)
    tidy_terminal(file)
    assert terminal.getvalue() == "\x1b[?25h\r\x1b[2K"
    assert file.getvalue() == ""


def log_of(folder: Path, **metrics: float | None) -> dict[str, object]:
    log = MetricLog(Logger(jsonl=True, tensorboard=False), folder, name="x", run_config={})
    log.write(1, metrics)
    entry: dict[str, object] = json.loads((folder / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    log.close()
    return entry


def test_metrics_are_on_disk_at_once(tmp_path: Path) -> None:
    entry = log_of(tmp_path, loss=2.5, grad_norm=None)
    assert (entry["step"], entry["loss"], entry["grad_norm"]) == (1, 2.5, None)


def test_what_json_cannot_say_is_null(tmp_path: Path) -> None:
    """NaN in metrics.jsonl stopped every reader but Python's."""
    entry = log_of(tmp_path, loss=float("nan"), grad_norm=float("inf"), lr=0.5)
    assert (entry["loss"], entry["grad_norm"], entry["lr"]) == (None, None, 0.5)


def test_a_missing_logger_package_is_named() -> None:
    import importlib.util

    found = {error.option for error in check_logger(Logger(tensorboard=True, wandb=True))}
    wanted = {f"logger.{name}" for name in ("tensorboard", "wandb") if importlib.util.find_spec(name) is None}
    assert found == wanted


def test_the_default_trains_without_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After `pip install 'hp_muon_plugin[megatron]'` the default was refused."""
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert check_logger(Logger()) == []
    MetricLog(Logger(), tmp_path, name="x", run_config={}).close()
    assert not (tmp_path / "tensorboard").exists()
    assert "set logger.tensorboard=false" in caplog.text
    assert [error.option for error in check_logger(Logger(tensorboard=True))] == ["logger.tensorboard"]
