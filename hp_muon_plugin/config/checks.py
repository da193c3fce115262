"""Checks of a whole configuration: everything that a user can get wrong and that needs no device to see.

All findings are collected, so that a user repairs a configuration once. Ranges of single numbers
are declared at the options (``config/ranges.py``); here is what several options together must be.
No torch here: the checks run before any process group exists.
"""

from collections.abc import Callable, Iterator

from hp_muon_plugin.config.checkpoint_checks import checkpoint_errors
from hp_muon_plugin.config.choices import Precision
from hp_muon_plugin.config.data_checks import data_errors
from hp_muon_plugin.config.dp_checks import dp_errors
from hp_muon_plugin.config.model_checks import model_errors
from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.config.optimizer_checks import optimizer_errors
from hp_muon_plugin.config.overlap_checks import overlap_errors
from hp_muon_plugin.config.qk_clip_checks import qk_clip_errors
from hp_muon_plugin.config.ranges import check_ranges
from hp_muon_plugin.config.topology_checks import data_parallel_size, topology_errors
from hp_muon_plugin.config.trainer import Train, default_warmup
from hp_muon_plugin.errors import ConfigError, raise_all

__all__ = ["check_optimizer", "check_train", "data_parallel_size"]

_Check = Callable[[Train, int], Iterator[ConfigError]]

# What each check reads. It runs only where every number there is in its range, so that it needs no
# guard of its own against a division by zero.
_CHECKS: tuple[tuple[frozenset[str], _Check], ...] = (
    (frozenset({"optimizer"}), lambda config, _: optimizer_errors(config.optimizer)),
    (frozenset({"topology"}), lambda config, world_size: topology_errors(config.topology, world_size)),
    (frozenset({"model", "topology"}), lambda config, _: model_errors(config.model, config.topology)),
    (frozenset({"run", "lr_schedule"}), lambda config, _: _run_errors(config)),
    (frozenset({"run", "topology"}), lambda config, world_size: _batch_errors(config, world_size)),
    (frozenset({"data"}), lambda config, _: data_errors(config.data, is_plan=config.run.dry)),
    (frozenset({"dp", "topology", "model"}), lambda config, world_size: dp_errors(config, world_size)),
    (frozenset({"optimizer", "model", "topology"}), lambda config, _: qk_clip_errors(config)),
    (frozenset({"optimizer", "topology"}), lambda config, _: overlap_errors(config)),
    (frozenset({"checkpoint"}), lambda config, _: checkpoint_errors(config.checkpoint)),
    (frozenset(), lambda config, _: _precision_errors(config)),
)


def check_train(config: Train, *, world_size: int) -> None:
    """Check a training configuration against the number of ranks.

    Args:
        config: The typed configuration.
        world_size: Ranks of the job.

    Raises:
        ConfigError: If one thing is wrong.
        ConfigErrors: If several are.
    """
    errors = list(check_ranges(config))
    wrong = {error.option.partition(".")[0] for error in errors}
    for groups, check in _CHECKS:
        if not groups & wrong:
            errors += check(config, world_size)
    raise_all(errors)


def check_optimizer(config: HpMuon | AdamW) -> None:
    """Check the options of an optimizer alone.

    Args:
        config: Options of ``hp_muon`` or ``adamw``.

    Raises:
        ConfigError: If one option is wrong.
        ConfigErrors: If several are.
    """
    raise_all([*check_ranges(config, "optimizer"), *optimizer_errors(config)])


def _run_errors(config: Train) -> Iterator[ConfigError]:
    run, schedule = config.run, config.lr_schedule
    for name in ("name", "dir"):
        if not getattr(run, name).strip():
            yield ConfigError(f"run.{name}", "''", "is empty", "e.g. run.name=train")
    if schedule.warmup_steps is not None and schedule.warmup_steps >= run.steps:
        yield ConfigError(
            "lr_schedule.warmup_steps",
            schedule.warmup_steps,
            f"the run has only run.steps={run.steps} steps",
            f"choose less than {run.steps}, or leave it out for {default_warmup(run.steps)}",
        )


def _batch_errors(config: Train, world_size: int) -> Iterator[ConfigError]:
    run = config.run
    if world_size % (config.topology.tp * config.topology.pp):
        return  # the ranks cannot be divided at all, which is an error of the topology
    dp = data_parallel_size(config.topology, world_size)
    step = run.micro_batch_size * dp
    if run.global_batch_size % step:
        yield ConfigError(
            "run.global_batch_size",
            run.global_batch_size,
            f"is not a multiple of micro_batch_size * data-parallel ranks = {run.micro_batch_size} * {dp} = {step}",
            f"e.g. run.global_batch_size={max(step, run.global_batch_size // step * step)}",
        )


def _precision_errors(config: Train) -> Iterator[ConfigError]:
    if config.platform.precision is Precision.fp16:
        yield ConfigError(
            "platform.precision",
            "fp16",
            "needs dynamic loss scaling; Newton-Schulz is invariant to the scale but AdamW and clipping are not, "
            "and megatron-core refuses fp16 with its own Muon too",
            "set platform.precision=bf16 or platform.precision=fp32",
        )
