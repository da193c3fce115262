"""One rank of a training run.

Started by our launcher as ``python -m hp_muon_plugin.train.worker CONFIG FOLDER``, or called by the
command line under torchrun. A failure is written to ``FOLDER/rank{N}.error.json`` for whoever
watches, and its traceback goes to standard error.
"""

import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path

from hp_muon_plugin.config.train_options import load_train
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.errors import HpMuonError

USAGE_EXIT = 2
FAILURE_EXIT = 1
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl


def run_rank(config: Train, folder: Path) -> None:
    """Train on this rank; every rank of the job calls it.

    Args:
        config: Checked options.
        folder: The run's folder.
    """
    from hp_muon_plugin.platform.base import choose
    from hp_muon_plugin.train.metrics import MetricLog
    from hp_muon_plugin.train.progress import make_display
    from hp_muon_plugin.train.setup import Launch, start_ranks

    launch = Launch.from_environment()
    quiet_logging(is_first_rank=launch.rank == 0)
    platform = choose(config.platform.name)
    start_ranks(platform, config.topology, launch)
    import torch.distributed as dist

    is_first = launch.rank == 0
    log = None
    display = make_display(config.run.steps, config.run.name, is_first_rank=is_first)
    try:
        if is_first:
            log = MetricLog(config.logger, folder, name=config.run.name, run_config=asdict(config))
        train_here(config, platform, log, display)
    finally:
        display.close()
        if log is not None:
            log.close()
    dist.barrier()
    dist.destroy_process_group()


def train_here(config: Train, platform: object, log: object, display: object) -> object:
    """Build everything and train; the process group exists.

    Args:
        config: Options.
        platform: Prepared platform.
        log: Metric sinks on rank 0, None elsewhere.
        display: Progress display.

    Returns:
        The run's :class:`~hp_muon_plugin.train.loop.Result`.
    """
    from hp_muon_plugin.train import setup
    from hp_muon_plugin.train.data import load_data
    from hp_muon_plugin.train.loop import Trainer

    setup.seed_everything(config.run.seed)
    data = load_data(config)
    model, _ = setup.build_model(config, data.vocab_size, platform)  # type: ignore[arg-type]
    optimizer = setup.build_optimizer(config, model)
    schedule = setup.build_schedule(config, optimizer)
    trainer = Trainer(
        config,
        model,
        optimizer,
        schedule,
        data=data,
        platform=platform,  # type: ignore[arg-type]
        log=log,  # type: ignore[arg-type]
        display=display,  # type: ignore[arg-type]
    )
    return trainer.train()


def quiet_logging(*, is_first_rank: bool) -> None:
    """Our messages from rank 0, warnings from elsewhere; megatron-core's chatter not at all.

    Args:
        is_first_rank: Whether this is global rank 0.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", force=True)
    logging.getLogger("hp_muon_plugin").setLevel(logging.INFO if is_first_rank else logging.WARNING)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(megatron|torch|transformer_engine|apex)\b.*")


def error_path(folder: Path, rank: int) -> Path:
    """Where a rank leaves the reason of its failure.

    Args:
        folder: The run's folder.
        rank: Global rank.

    Returns:
        The path.
    """
    return folder / f"rank{rank}.error.json"


def log_path(folder: Path, rank: int) -> Path:
    """Where a rank other than 0 writes its output, and every rank its traceback.

    Args:
        folder: The run's folder.
        rank: Global rank.

    Returns:
        The path.
    """
    return folder / f"rank{rank}.log"


def report_failure(error: BaseException, folder: Path, rank: int) -> int:
    """Leave the reason of a failure for the launcher.

    Args:
        error: What was raised.
        folder: The run's folder.
        rank: Global rank.

    Returns:
        The exit code: 2 for a user's mistake, 1 for anything else.
    """
    is_ours = isinstance(error, HpMuonError)
    text = str(error) if is_ours else f"{type(error).__name__}: {error}"
    record = {"rank": rank, "time": time.time(), "is_usage": is_ours, "message": text}
    folder.mkdir(parents=True, exist_ok=True)
    error_path(folder, rank).write_text(json.dumps(record), encoding="utf-8")
    return USAGE_EXIT if is_ours else FAILURE_EXIT


def _die_with_parent() -> None:
    """Linux: no rank outlives a launcher that was killed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def main() -> None:
    """Entry point of a rank that our launcher started."""
    _die_with_parent()
    config_path, folder = Path(sys.argv[1]), Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    try:
        run_rank(load_train(config_path), folder)
    except Exception as error:  # the rank ends here, whatever it was
        code = report_failure(error, folder, rank)
        if rank == 0:  # its standard error is the user's terminal, which gets the launcher's message
            with log_path(folder, rank).open("a", encoding="utf-8") as log:
                traceback.print_exc(file=log)
        else:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # other ranks may be inside a collective: do not wait for them in a destructor


if __name__ == "__main__":
    main()
