"""One rank of a training run.

Started by our launcher through ``hp_muon_plugin.train.rank_main``, or called by the command line
under torchrun. A failure is written to ``FOLDER/rank{N}.error.json`` for whoever watches, and its
traceback to ``FOLDER/rank{N}.log``.
"""

import contextlib
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from hp_muon_plugin.config.train_options import load_train
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.errors import HpMuonError, RunError
from hp_muon_plugin.platform.collecting import without_collecting
from hp_muon_plugin.platform.failures import naming
from hp_muon_plugin.train.environment import Launch
from hp_muon_plugin.train.interruption import noted
from hp_muon_plugin.train.reports import leave_report
from hp_muon_plugin.train.run_folder import claimed, error_path, log_path, write_config

if TYPE_CHECKING:
    from hp_muon_plugin.train.loop import Result

USAGE_EXIT = 2
FAILURE_EXIT = 1
SETTLE_S = 1.0
"""How long after the first failure other ranks may report: the cause is the earliest report."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a run ended early.

    Attributes:
        rank: The rank that failed first.
        message: What it said.
        exit_code: 2 for a user's mistake, 1 for anything else.
        log: File with its traceback, or None if it left none.
    """

    rank: int
    message: str
    exit_code: int
    log: Path | None


class Terminated(BaseException):
    """This rank got SIGTERM: the launcher ends the run."""


def run_process(config_path: str, folder: str) -> None:
    """Be one rank from here to the end of the process.

    Args:
        config_path: File with checked options.
        folder: The run's folder.
    """
    run_and_report(lambda: run_rank(load_train(Path(config_path)), Path(folder)), Path(folder))


def run_and_report(function: Callable[[], None], folder: Path) -> None:
    """Run what a rank has to do; if it fails, report that and end the process.

    Args:
        function: What to do.
        folder: The run's folder.
    """
    signal.signal(signal.SIGTERM, _terminate)
    rank = int(os.environ["RANK"])
    try:
        function()
    except Terminated:
        _end_by_signal()
    except Exception as error:  # the rank ends here, whatever it was
        code = report_failure(error, folder, rank)
        _flush()
        os._exit(code)  # other ranks may be inside a collective: do not wait for them in a destructor


def run_foreign_rank(config: Train, folder: Path) -> Failure | None:
    """Be a rank that torchrun started; rank 0 holds the run's folder.

    Args:
        config: Checked options.
        folder: The run's folder.

    Returns:
        None if it ended well. After a failure other ranks may be inside a collective, so the process
        must end without destructors.
    """
    launch = Launch.from_environment()
    with claimed(folder) if launch.rank == 0 else contextlib.nullcontext():
        if launch.rank == 0:
            write_config(config, folder)
        try:
            run_rank(config, folder)
        except Terminated:  # asked to, and its checkpoint is written
            _end_by_signal()
        except Exception as error:
            code = report_failure(error, folder, launch.rank)
            return Failure(launch.rank, explained(error), code, log_path(folder, launch.rank))
    return None


def is_told_by_rank_0(folder: Path, rank: int) -> bool:
    """Whether rank 0 has failed as well, and tells the user: most failures are of all ranks alike.

    Args:
        folder: The run's folder.
        rank: A rank that has failed.

    Returns:
        False if this rank must speak.
    """
    if rank == 0:
        return False
    time.sleep(SETTLE_S)
    return error_path(folder, 0).is_file()


def run_rank(config: Train, folder: Path) -> None:
    """Train on this rank; every rank of the job calls it.

    Args:
        config: Checked options.
        folder: The run's folder.
    """
    launch = Launch.from_environment()
    with without_collecting():
        from hp_muon_plugin.platform.base import choose
        from hp_muon_plugin.train.adaptor import megatron_arguments
        from hp_muon_plugin.train.metrics import MetricLog
        from hp_muon_plugin.train.progress import make_display
        from hp_muon_plugin.train.setup import start_ranks

        quiet_logging(is_first_rank=launch.rank == 0)
        platform = choose(config.platform.name)
        start_ranks(platform, config.topology, launch, arguments=megatron_arguments(config))
        import torch.distributed as dist

    is_first = launch.rank == 0
    log = None
    display = make_display(config.run.steps, is_first_rank=is_first)
    try:
        if is_first:
            log = MetricLog(config.logger, folder, name=config.run.name, run_config=asdict(config))
        with noted(is_wanted=config.checkpoint.on_interrupt):
            result = train_here(config, platform, log, display, folder)
    finally:
        display.close()
        if log is not None:
            log.close()
    with naming("barrier of {} at the end"):
        dist.barrier()
    dist.destroy_process_group()
    if result.is_interrupted:
        raise Terminated


def train_here(config: Train, platform: object, log: object, display: object, folder: Path | None = None) -> "Result":
    """Build everything and train; the process group exists.

    Args:
        config: Options.
        platform: Prepared platform.
        log: Metric sinks on rank 0, None elsewhere.
        display: Progress display.
        folder: The run's folder; None takes ``run.dir``.

    Returns:
        The run's result.
    """
    with without_collecting():
        from hp_muon_plugin.train import setup
        from hp_muon_plugin.train.checkpoints import Checkpoints
        from hp_muon_plugin.train.data import load_data
        from hp_muon_plugin.train.loop import Trainer

    setup.seed_everything(config.run.seed)
    data = load_data(config)
    model, _ = setup.build_model(config, data.vocab_size, platform)  # type: ignore[arg-type]
    optimizer = setup.build_optimizer(config, model)
    schedule = setup.build_schedule(config, optimizer)
    checkpoints = Checkpoints(
        config,
        folder or Path(config.run.dir),
        model,
        optimizer,
        schedule,
        data=data,
        device=platform.device(),  # type: ignore[attr-defined]
    )
    trainer = Trainer(
        config,
        model,
        optimizer,
        schedule,
        checkpoints=checkpoints,
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


def report_failure(error: Exception, folder: Path, rank: int) -> int:
    """Leave the reason of a failure for whoever watches, and its traceback in the rank's log.

    Args:
        error: What was raised.
        folder: The run's folder.
        rank: Global rank.

    Returns:
        The exit code: 2 for a user's mistake, 1 for anything else.
    """
    is_usage = is_mistake(error)
    leave_report({"rank": rank, "time": time.time(), "is_usage": is_usage, "message": explained(error)}, folder)
    with contextlib.suppress(OSError), log_path(folder, rank).open("a", encoding="utf-8") as log:
        traceback.print_exception(error, file=log)
    return USAGE_EXIT if is_usage else FAILURE_EXIT


def is_mistake(error: Exception) -> bool:
    """Whether an error is a user's mistake, and not a failure of the run itself.

    Args:
        error: What was raised.

    Returns:
        True for exit code 2, False for 1.
    """
    return isinstance(error, HpMuonError) and not isinstance(error, RunError)


def explained(error: Exception) -> str:
    """What to tell the user of an error.

    Args:
        error: What was raised.

    Returns:
        The message; for what is not ours, with the name of its type.
    """
    if isinstance(error, HpMuonError):
        return str(error)
    if isinstance(error, BrokenPipeError):
        return "nobody reads its standard output any more (as after `| head`)"
    return f"{type(error).__name__}: {error}"


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Close the bar and the logs on the way out; the launcher kills what takes longer than 3 seconds."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated


def _end_by_signal() -> None:
    """So that whoever waits for this process sees why it ended."""
    _flush()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            pass
