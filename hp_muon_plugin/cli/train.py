"""``hp-muon train``."""

import os
import sys
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from hp_muon_plugin.checkpoint.folders import TRACKER
from hp_muon_plugin.cli.hydra_app import complain, flags_first, run_hydra, say
from hp_muon_plugin.cli.interrupts import raise_if_interrupted
from hp_muon_plugin.cli.plan_text import plan_text, warnings_text
from hp_muon_plugin.cli.sweep_file import sweep_file
from hp_muon_plugin.config.checkpoint_checks import is_saving
from hp_muon_plugin.config.checks import check_train
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.train_options import typed_train
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.errors import ConfigError, ConfigErrors, raise_all
from hp_muon_plugin.muon.stability import coefficients_of
from hp_muon_plugin.train.checkpoint_folder import check_checkpoints, save_folder
from hp_muon_plugin.train.environment import check_environment, is_rank, speaks
from hp_muon_plugin.train.launch import INTERRUPTED_EXIT, Interrupted, launch_ranks
from hp_muon_plugin.train.metrics import check_logger
from hp_muon_plugin.train.preflight import check_machine, check_plan
from hp_muon_plugin.train.progress import tidy_terminal
from hp_muon_plugin.train.run_folder import METRICS, check_folder
from hp_muon_plugin.train.worker import USAGE_EXIT, Failure, is_told_by_rank_0, run_foreign_rank

_DRY_RUN = {"--dry-run": "run.dry=true"}


def run(arguments: list[str]) -> int:
    """Compose, check, and train.

    Args:
        arguments: Hydra overrides and flags, in any order; ``--dry-run`` stands for ``run.dry=true``.

    Returns:
        Exit code: 0; 2 for a mistake in the configuration or the data; 1 for a failed rank or a
        loss that diverged; 130 after Ctrl-C.
    """
    return run_hydra(_job, "hp_muon_train", flags_first([_DRY_RUN.get(argument, argument) for argument in arguments]))


def _job(composed: DictConfig) -> int:
    config = typed_train(composed)
    world_size = _world_size(config)
    _check(config, world_size)
    raise_if_interrupted()  # a resolver may have dropped it
    if config.run.dry:
        if speaks():
            print(plan_text(config, world_size))
        return 0
    folder = _run_folder(config)
    check_folder(folder)
    check_checkpoints(config, folder)
    check_machine(config)
    if speaks():
        for text in warnings_text(config, world_size):
            say(f"warning: {text}")
    sweep_file.keep()
    if is_rank():
        return _run_this_rank(config, folder)
    return _run_all_ranks(config, folder, world_size)


def _run_folder(config: Train) -> Path:
    """Hydra makes the folder that it is told of before anything is checked, so ``conf/`` tells it of one that is there.

    A ``hydra.run.dir`` or ``hydra.sweep.subdir`` of the user's own counts as it stands.
    """
    hydra = HydraConfig.get()
    told = Path(hydra.runtime.output_dir)
    if told != Path.cwd():
        return told
    folder = Path(config.run.dir).absolute()
    return folder / hydra.job.override_dirname if hydra.mode is RunMode.MULTIRUN else folder


def _run_all_ranks(config: Train, folder: Path, world_size: int) -> int:
    try:
        failure = launch_ranks(config, folder, num_ranks=world_size)
    except Interrupted:
        tidy_terminal(sys.stdout)
        complain(f"interrupted; every rank has ended{_metrics_note(folder)}{_checkpoint_note(config, folder)}")
        return INTERRUPTED_EXIT
    if failure is not None:
        tidy_terminal(sys.stdout)
        _report(failure)
        return failure.exit_code
    written = f"; metrics are in {_shown(folder)}" if config.logger.jsonl else ""
    print(f"done{written}")
    return 0


def _report(failure: Failure) -> None:
    if failure.exit_code == USAGE_EXIT:
        say(failure.message)
        return
    where = "" if failure.log is None else f"\n  its output: {_shown(failure.log)}"
    say(f"rank {failure.rank} failed: {failure.message}{where}")


def _metrics_note(folder: Path) -> str:
    path = folder / METRICS
    if path.is_file() and path.stat().st_size:
        return f", and metrics up to the last step are in {_shown(folder)}"
    return " before the first step was done"


def _checkpoint_note(config: Train, folder: Path) -> str:
    if not is_saving(config.checkpoint):
        return ""
    path = save_folder(config, folder) / TRACKER
    if not path.is_file():
        return "; no checkpoint was saved"
    return f"; the last checkpoint is of step {path.read_text(encoding='ascii')}, go on with checkpoint.resume=auto"


def _run_this_rank(config: Train, folder: Path) -> int:
    """Under torchrun: this process is a rank."""
    failure = run_foreign_rank(config, folder)
    if failure is None:
        return 0
    if not is_told_by_rank_0(folder, failure.rank):
        _report(failure)
    os._exit(failure.exit_code)  # other ranks may be inside a collective: do not wait for them in a destructor


def _world_size(config: Train) -> int:
    ranks = config.topology.ranks
    if not is_rank():
        return 1 if ranks is None else ranks
    check_environment(os.environ)
    world_size = int(os.environ["WORLD_SIZE"])
    if ranks not in (None, world_size):
        raise ConfigError(
            "topology.ranks",
            ranks,
            f"torchrun started {world_size} ranks",
            f"start as many with torchrun, or let it decide: topology.ranks=null (or {world_size})",
        )
    return world_size


def _check(config: Train, world_size: int) -> None:
    """Everything that needs neither megatron-core nor a folder, all findings in one message."""
    errors = check_logger(config.logger)
    try:
        check_train(config, world_size=world_size)
    except ConfigError as error:
        errors.append(error)
    except ConfigErrors as several:
        errors += several.errors
    wrong = {error.option for error in errors}
    if isinstance(config.optimizer, HpMuon) and not wrong & {"optimizer.steps", "optimizer.coefficients"}:
        try:
            coefficients_of(config.optimizer)
        except ConfigError as error:
            errors.append(error)
    raise_all(errors)
    check_plan(config)


def _shown(path: Path) -> str:
    """A path as a user would write it: relative where it lies below the working folder."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


if __name__ == "__main__":  # as `torchrun -m hp_muon_plugin.cli.train OVERRIDE ...`
    from hp_muon_plugin.cli.main import run_module

    run_module("train")
