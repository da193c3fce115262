import io
import json
from pathlib import Path

from hp_muon_plugin.config.trainer import Logger
from hp_muon_plugin.train.metrics import MetricLog, check_logger
from hp_muon_plugin.train.progress import Lines, Silent, make_display


def test_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    lines = Lines(100, stream)
    lines.update(1, "loss 3", is_logged=True)
    lines.update(2, "loss 2", is_logged=False)
    lines.update(10, "loss 1", is_logged=True)
    assert stream.getvalue() == "step   1/100  loss 3\nstep  10/100  loss 1\n"


def test_only_the_first_rank_shows_anything() -> None:
    assert isinstance(make_display(3, "x", is_first_rank=False), Silent)
    assert isinstance(make_display(3, "x", is_first_rank=True), Lines)  # pytest's output is no terminal


def test_metrics_are_on_disk_at_once(tmp_path: Path) -> None:
    log = MetricLog(Logger(jsonl=True, tensorboard=False), tmp_path, name="x", run_config={})
    log.write(1, {"loss": 2.5, "grad_norm": None})
    entry = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (entry["step"], entry["loss"], entry["grad_norm"]) == (1, 2.5, None)
    log.close()


def test_a_missing_logger_package_is_named() -> None:
    import importlib.util

    found = {error.option for error in check_logger(Logger(tensorboard=True, wandb=True))}
    wanted = {f"logger.{name}" for name in ("tensorboard", "wandb") if importlib.util.find_spec(name) is None}
    assert found == wanted
