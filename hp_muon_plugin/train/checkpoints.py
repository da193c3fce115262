"""Checkpoints of ``hp-muon train``: when to save, what a run is besides its tensors, and how it goes on."""

import functools
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hp_muon_plugin.checkpoint.canonical import RunState
from hp_muon_plugin.config.checkpoint_checks import AUTO, is_saving
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.megatron.checkpoints import (
    Found,
    Saver,
    Team,
    load_run,
    open_checkpoint,
    open_latest,
    restore_random,
    save_run,
)
from hp_muon_plugin.megatron.optimizer import HpMuonMegatronOptimizer
from hp_muon_plugin.train.checkpoint_fit import too_late
from hp_muon_plugin.train.checkpoint_folder import refuse_earlier, save_folder
from hp_muon_plugin.train.data import TrainingData, order_of_samples
from hp_muon_plugin.train.differences import changed_values
from hp_muon_plugin.train.interruption import is_asked
from hp_muon_plugin.train.setup import seed_everything

logger = logging.getLogger(__name__)

_SEED_STEP = 1_000_003  # between the seeds of two steps, so that runs that go on with other ranks draw anew
_SCHEDULE = ("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style", "start_wd", "end_wd")


@dataclass(slots=True)
class Progress:
    """How far a run is.

    Attributes:
        step: Steps done, with those that were left out.
        consumed_samples: Training samples seen.
        num_bad: Steps in a row, up to now, with a loss or a gradient that was not finite.
        num_skipped: Steps that were left out.
    """

    step: int = 0
    consumed_samples: int = 0
    num_bad: int = 0
    num_skipped: int = 0


class Checkpoints:
    """Saves and resumes one run. All methods are collective.

    Args:
        config: Options.
        folder: The run's folder.
        model: Wrapped model chunk of this pipeline stage.
        optimizer: A MegatronOptimizer.
        schedule: An OptimizerParamScheduler.
        data: Datasets; None leaves the order of samples unchecked.
        device: Where the model lives.
    """

    def __init__(
        self,
        config: Train,
        folder: Path,
        model: torch.nn.Module,
        optimizer: Any,
        schedule: Any,
        *,
        data: TrainingData | None,
        device: torch.device,
    ) -> None:
        self._config, self._options = config, config.checkpoint
        self._chunks, self._optimizer, self._schedule = [model], optimizer, schedule
        self._data, self._device = data, device
        self._save = save_folder(config, folder)
        self._saver: Saver | None = None

    @functools.cached_property
    def _team(self) -> Team:
        """Made where it is first needed, by all ranks alike: a run that neither saves nor resumes makes no group."""
        return Team()

    def resume(self) -> Progress:
        """Go on from a checkpoint, if the options say so and there is one.

        Returns:
            Where training begins.

        Raises:
            CheckpointError: If it is damaged, or of another model or optimizer.
            ConfigError: If all steps are done, or the folder holds another run's checkpoints.
        """
        found, progress = self._found(), Progress()
        if found is not None:
            progress = self._go_on(found)
        if is_saving(self._options):
            self._saver = Saver(
                self._save,
                self._team,
                keep=self._options.keep,
                spared=None if found is None else found.folder,
                asynchronous=self._options.asynchronous,
            )
        return progress

    def after_step(self, progress: Progress) -> bool:
        """Save if it is time, and publish what an earlier asynchronous save has written.

        Args:
            progress: How far the run is.

        Returns:
            Whether the run was asked to end; then all is saved.

        Raises:
            CheckpointError: On every rank, if one of them could not save.
        """
        saver = self._saver
        if saver is None:
            return False
        is_ending = False
        if self._options.on_interrupt:  # all ranks, 8 bytes in each step: they must end after the same one
            (asked,) = saver.poll(int(is_asked()))
            is_ending = bool(asked)
        else:
            saver.poll()
        every, is_last = self._options.every, progress.step == self._config.run.steps
        if is_ending or is_last or (every is not None and progress.step % every == 0):
            self.save(progress)
        if is_ending or is_last:
            saver.wait()
        return is_ending and not is_last

    def save(self, progress: Progress) -> None:
        """Save now, or begin to.

        Args:
            progress: How far the run is.

        Raises:
            CheckpointError: On every rank, if one of them could not save.
        """
        assert self._saver is not None
        save_run(self._saver, progress.step, self._chunks, self._optimizer, self._state(progress))

    def _found(self) -> Found | None:
        options = self._options
        if options.resume is None:
            if is_saving(options):
                self._team.first("checkpoint.save", lambda: refuse_earlier(self._save))
            return None
        if options.resume != AUTO:
            return open_checkpoint(Path(options.resume), self._team, verify=options.verify)
        found = open_latest(self._save, self._team, verify=options.verify)
        if found is None and self._team.is_first:
            logger.info("there is no checkpoint in %s yet: the run begins anew", self._save)
        return found

    def _state(self, progress: Progress) -> RunState:
        config = self._config
        model = asdict(config.model)
        return RunState(
            iteration=progress.step,
            consumed_samples=progress.consumed_samples,
            scheduler=_plain(self._schedule.state_dict()),
            vocab_size=None if self._data is None else self._data.vocab_size,
            data=_plain(
                {**asdict(config.data), "seed": config.run.seed, "order": self._order(progress.consumed_samples)}
            ),
            model=_plain(
                {
                    **model,
                    "num_experts": None if config.model.moe is None else config.model.moe.num_experts,
                    "tied": config.model.tie_embeddings,
                }
            ),
            other={"progress": asdict(progress), "ranks": self._ranks(), "config": _plain(asdict(config))},
        )

    def _ranks(self) -> dict[str, Any]:
        topology = self._config.topology
        sizes = {"tp": topology.tp, "pp": topology.pp, "ep": topology.ep, "etp": topology.etp}
        return {"ranks": self._team.size, **sizes, "device": self._device.type}

    def _order(self, count: int) -> int | None:
        return None if self._data is None else order_of_samples(self._data.train, count)

    def _go_on(self, found: Found) -> Progress:
        options, is_first = self._options, self._team.is_first
        state = load_run(
            found,
            self._chunks,
            self._optimizer,
            self._team,
            load_optimizer=options.load_optimizer,
            model_options=asdict(self._config.model),
        )
        progress = self._position(state, found.folder) if options.load_position else Progress()
        if is_first:
            logger.info(
                "going on from %s: step %d, %d samples seen%s",
                found.folder,
                progress.step,
                progress.consumed_samples,
                "" if options.load_optimizer else "; the optimizer's state is new",
            )
        if options.load_random:
            self._random(state, progress)
        return progress

    def _position(self, state: RunState, folder: Path) -> Progress:
        saved, steps = state.other.get("progress"), self._config.run.steps
        progress = Progress(state.iteration, state.consumed_samples or 0) if saved is None else Progress(**saved)
        if progress.step > steps:
            raise too_late(steps, progress.step, folder)
        # Ours counts optimizer steps; schedules of other trainers count samples.
        taken = state.scheduler.get("num_steps", 0) if saved is not None else progress.step
        self._schedule.num_steps = 0
        self._schedule.step(increment=taken)
        if isinstance(self._optimizer, HpMuonMegatronOptimizer):
            self._optimizer.optimizer.skipped_steps = progress.num_skipped
        if self._team.is_first:
            self._tell_differences(state, progress)
        return progress

    def _tell_differences(self, state: RunState, progress: Progress) -> None:
        if progress.step and state.consumed_samples is None and "progress" not in state.other:
            logger.warning("the checkpoint does not tell how many samples it has seen: data begins at the first one")
        scheduler = {name: state.scheduler[name] for name in _SCHEDULE if name in state.scheduler}
        if changed := list(changed_values(scheduler, _plain(self._schedule.state_dict()))):
            logger.info("this run's learning-rate schedule holds from here on: %s", ", ".join(changed))
        ran_with = state.other.get("config", {}).get("optimizer", {})
        if changed := sorted(changed_values(ran_with, _plain(asdict(self._config.optimizer)), "optimizer.")):
            logger.warning("this run's options hold, not the checkpoint's: %s", ", ".join(changed))
        order = self._order(progress.consumed_samples)
        if order is not None and state.data.get("order") not in (None, order):
            logger.warning(
                "the samples that the checkpoint has seen are not those with which this run would have begun: data, "
                "run.seed, model.seq_length or the number of epochs (run.steps) differ; some may come again"
            )

    def _random(self, state: RunState, progress: Progress) -> None:
        is_same = state.other.get("ranks") == self._ranks()
        if is_same and restore_random(state, self._team.rank, self._chunks):
            return
        seed = (self._config.run.seed + _SEED_STEP * progress.step) % 2**32
        seed_everything(seed)
        if self._team.is_first:
            logger.info("random states are of other ranks, so all ranks are seeded anew, with %d", seed)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Values as JSON has them: enums are their names."""
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain
