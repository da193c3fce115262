"""``hp-muon train``."""

import os
import sys
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from hp_muon_plugin.cli.hydra_app import USAGE_EXIT, complain, run_hydra
from hp_muon_plugin.cli.plan_text import plan_text
from hp_muon_plugin.config.checks import check_train
from hp_muon_plugin.config.choices import DataKind
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.train_options import typed_train
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.errors import ConfigError, ConfigErrors, raise_all
from hp_muon_plugin.megatron.lane_checks import check_lane
from hp_muon_plugin.muon.coefficients import resolve_schedule
from hp_muon_plugin.train.index_file import check_index
from hp_muon_plugin.train.launch import INTERRUPTED_EXIT, Interrupted, launch_ranks
from hp_muon_plugin.train.metrics import check_logger
from hp_muon_plugin.train.text import vocabulary_size
from hp_muon_plugin.train.token_checks import check_parts, check_vocabulary

_DRY_RUN = {"--dry-run": "run.dry=true"}


def run(arguments: list[str]) -> int:
    """Compose, check, and train.

    Args:
        arguments: Hydra overrides and flags; ``--dry-run`` stands for ``run.dry=true``.

    Returns:
        Exit code: 0; 2 for a mistake in the configuration or the data; 1 for a failed rank; 130
        after Ctrl-C.
    """
    return run_hydra(_job, "hp_muon_train", [_DRY_RUN.get(argument, argument) for argument in arguments])


def _job(composed: DictConfig) -> int:
    config = typed_train(composed)
    is_rank = "RANK" in os.environ
    world_size = _world_size(config, is_rank)
    _check(config, world_size)
    folder = Path(HydraConfig.get().runtime.output_dir)
    if config.run.dry:
        if os.environ.get("RANK", "0") == "0":
            print(plan_text(config, world_size))
        return 0
    if is_rank:
        return _run_this_rank(config, folder)
    try:
        failure = launch_ranks(config, folder, num_ranks=world_size)
    except Interrupted:
        complain(f"interrupted; every rank has ended, and metrics up to the last step are in {_shown(folder)}")
        return INTERRUPTED_EXIT
    if failure is None:
        print(f"done; metrics are in {_shown(folder)}")
        return 0
    complain(failure.message if failure.exit_code == USAGE_EXIT else f"rank {failure.rank} failed: {failure.message}")
    if failure.log is not None and failure.exit_code != USAGE_EXIT:
        print(f"  its output: {_shown(failure.log)}", file=sys.stderr)
    return failure.exit_code


def _run_this_rank(config: Train, folder: Path) -> int:
    """Under torchrun: this process is a rank."""
    from hp_muon_plugin.train.worker import run_rank

    run_rank(config, folder)
    return 0


def _world_size(config: Train, is_rank: bool) -> int:
    ranks = config.topology.ranks
    if not is_rank:
        return 1 if ranks is None else ranks
    world_size = int(os.environ["WORLD_SIZE"])
    if ranks not in (None, world_size):
        raise ConfigError(
            "topology.ranks",
            ranks,
            f"torchrun started {world_size} ranks",
            "leave topology.ranks out under torchrun",
        )
    return world_size


def _check(config: Train, world_size: int) -> None:
    errors: list[ConfigError] = []
    if world_size < 1:
        errors.append(ConfigError("topology.ranks", world_size, "must be at least 1", "e.g. topology.ranks=2"))
    errors += check_logger(config.logger)
    try:
        check_train(config, world_size=max(world_size, 1))
    except ConfigError as error:
        errors.append(error)
    except ConfigErrors as several:
        errors += several.errors
    if isinstance(config.optimizer, HpMuon):
        options = config.optimizer
        try:
            resolve_schedule(options.schedule, steps=options.steps, custom=options.coefficients)
        except ConfigError as error:
            errors.append(error)
    raise_all(errors)
    if not config.run.dry:
        check_lane(config)
    if config.data.kind is DataKind.megatron and config.data.path is not None:
        file = check_index(config.data.path)
        check_vocabulary(file, vocabulary_size(config.data))
        check_parts(file.lengths, config.data.split, config.model.seq_length)


def _shown(path: Path) -> str:
    """A path as a user would write it: relative where it lies below the working folder."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
