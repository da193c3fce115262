"""The fixtures' model under our wrappers and optimizers, gone on with from a converted fixture."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hp_muon_plugin.config.choices import Precision
from hp_muon_plugin.config.data_parallel import DpOptions, HpFsdp
from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.config.trainer import Checkpoint, LrSchedule, Topology, Train
from hp_muon_plugin.megatron.versions import core_version
from hp_muon_plugin.train import setup
from hp_muon_plugin.train.setup import Launch
from lane.harness import dense, start, train_config
from lane.upstream_model import model_of
from lane.upstream_runs import STEPS, Load, Run

Where = tuple[int, int, int, float, list[str]]
WAYS: dict[str, DpOptions] = {"megatron_ddp": None, "hp_fsdp": HpFsdp()}


def options(body: dict[str, Any], way: str, folder: Path, save: Path) -> Train:
    """A fixture's run in our trainer's options; its schedule counts samples, ours steps.

    Args:
        body: Describes the run.
        way: Name of the wrapper.
        folder: The converted checkpoint.
        save: Where it is saved again.
    """
    schedule = body["scheduler"]
    per_step = schedule["num_steps"] / body["iteration"]
    routers = ["*.router.weight"] if body["arch"] == "moe" else []  # Megatron's Muon takes them
    muon = HpMuon(lr=schedule["max_lr"], weight_decay=0.1, muon_params=routers)
    config = train_config(
        dense(),  # only named in errors: the model is upstream_model.py's
        Topology(ep=body["ep"] if way == "megatron_ddp" else 1),
        optimizer=muon if body["optimizer"] == "muon" else AdamW(lr=schedule["max_lr"]),
        precision=Precision.bf16 if body["bf16"] else Precision.fp32,
        dp=WAYS[way],
    )
    config.run.steps = schedule["lr_decay_steps"] / per_step
    warmup = LrSchedule(warmup_steps=schedule["lr_warmup_steps"] / per_step, min_ratio=0.1)
    return replace(config, lr_schedule=warmup, checkpoint=Checkpoint(resume=str(folder), save=str(save)))


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    """Warnings of our trainer's checkpoints."""
    found: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, heard = logging.getLogger("hp_muon_plugin.train.checkpoints"), Heard(logging.WARNING)
    logger.addHandler(heard)
    yield found
    logger.removeHandler(heard)


class Ours(Run):
    """Objects of a rank of our trainer, around the fixtures' model.

    Args:
        launch: This rank.
        body: Describes the run.
        config: Of :func:`options`.
    """

    def __init__(self, launch: Launch, body: dict[str, Any], config: Train) -> None:
        from megatron.core import parallel_state
        from megatron.core.transformer.module import Float16Module

        start(launch, config)
        self.body, self.mpu, self.config = {**body, "ep": config.topology.ep}, parallel_state, config
        self.inner = model_of(self.body)
        module = Float16Module(self.inner.config, self.inner) if body["bf16"] else self.inner
        self.model = setup._wrapped(config.dp, self.inner.config, module)
        self.optimizer = setup.build_optimizer(config, self.model)
        self.schedule, self.increment = setup.build_schedule(config, self.optimizer), 1

    def resume(self) -> Where:
        """Go on, and save at once what was loaded: step, place in the schedule, samples, learning rate, warnings."""
        from hp_muon_plugin.train.checkpoints import Checkpoints

        checkpoints = Checkpoints(
            self.config,
            Path("unused"),
            self.model,
            self.optimizer,
            self.schedule,
            data=None,
            device=torch.device("cpu"),
        )
        with told() as warnings:
            progress = checkpoints.resume()
        checkpoints.save(progress)
        checkpoints._saver.wait()
        rate = next(group["lr"] for group in self.optimizer.param_groups if group["params"])
        return progress.step, self.schedule.num_steps, progress.consumed_samples, rate, warnings


def resumed(launch: Launch, body: dict[str, Any], config: Train) -> tuple[Where, list[float]]:
    """Where a rank goes on, and losses of the steps that follow."""
    run = Ours(launch, body, config)
    where = run.resume()
    losses = torch.tensor([run.step(number) for number in range(STEPS)])
    dist.all_reduce(losses)  # Megatron's are of each rank's own samples
    return where, (losses / launch.world_size).tolist()


def upstream(launch: Launch, body: dict[str, Any], load: Load) -> list[float]:
    """Losses of megatron-core's own run from the fixture as it is."""
    run = Run(launch, body)
    if core_version().lane < (0, 14) and body["arch"].startswith("moe"):
        run.step(0)  # as in upstream_runs.py
    run.load(load)
    losses = torch.tensor([run.step(number) for number in range(STEPS)])
    dist.all_reduce(losses)
    return (losses / launch.world_size).tolist()
