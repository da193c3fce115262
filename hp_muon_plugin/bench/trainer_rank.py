"""One rank of ``hp-muon bench trainer``: ``python -m hp_muon_plugin.bench.trainer_rank PLAN FOLDER``.

One process group, one model per wrapper, all with the same weights and batches; they take turns step by step.
"""

import functools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hp_muon_plugin.bench.trainer_cases import ALONE, model_of, peers, train_of
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.train.environment import Launch
from hp_muon_plugin.train.import_ahead import import_ahead as import_ahead  # the nursery calls it
from hp_muon_plugin.train.rank_main import LAUNCHER, die_with
from hp_muon_plugin.train.worker import quiet_logging, run_and_report

_CHECKED = 3
"""Steps whose losses are compared, before any is timed."""
_LEAST = 5


@dataclass(frozen=True, slots=True)
class Plan:
    """What all ranks do.

    Attributes:
        cases: As :func:`~hp_muon_plugin.bench.trainer_cases.model_of` reads them.
        optimizer: ``adamw`` or ``hp_muon``.
        precision: ``fp32`` or ``bf16``.
        seconds: About how long to time one case.
        timeout_s: How long a collective may take.
    """

    cases: list[str]
    optimizer: str
    precision: str
    seconds: float
    timeout_s: float


def run_rank(plan: Plan, folder: Path) -> None:
    """Measure every case; every rank of the job calls it.

    Args:
        plan: What.
        folder: Receives ``found{rank}.{case}.json``.
    """
    from hp_muon_plugin.platform.base import choose
    from hp_muon_plugin.train.adaptor import megatron_arguments
    from hp_muon_plugin.train.setup import start_ranks

    launch = Launch.from_environment()
    quiet_logging(is_first_rank=False)
    warnings.filterwarnings("ignore")
    first = train_of(model_of(plan.cases[0], "case"), plan.optimizer, plan.precision, launch.world_size)
    platform = choose(first.platform.name)
    topology = replace(first.topology, timeout_s=plan.timeout_s)
    start_ranks(platform, topology, launch, arguments=megatron_arguments(first))
    for number, text in enumerate(plan.cases):
        config = train_of(model_of(text, "case"), plan.optimizer, plan.precision, launch.world_size)
        found = _measure(config, platform, plan.seconds)
        (folder / f"found{launch.rank}.{number}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _measure(config: Train, platform: Any, seconds: float) -> dict[str, Any]:
    steps: dict[str, Callable[[], float]] = {}
    losses: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    for name, dp in peers(config).items():
        try:
            steps[name] = _stepper(replace(config, dp=dp), platform)
            losses[name] = [steps[name]() for _ in range(_CHECKED)]
        except Exception as error:  # a peer that this megatron-core cannot run is told, the others go on
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            steps.pop(name, None)
    steps[ALONE] = _alone(config, platform)
    steps[ALONE]()
    times = _interleaved(steps, platform, seconds)
    return {"times": times, "losses": losses, "failed": failed}


def _interleaved(steps: dict[str, Callable[[], float]], platform: Any, seconds: float) -> dict[str, list[list[float]]]:
    """CPU and wall seconds of each round; each round begins with the next one, and all ranks begin together."""
    names = list(steps)
    found: dict[str, list[list[float]]] = {name: [[], []] for name in names}
    began, number = time.perf_counter(), 0
    goes_on = torch.ones(1)
    while float(goes_on):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            platform.synchronize()
            dist.barrier()
            start = time.process_time(), time.perf_counter()
            steps[name]()
            platform.synchronize()
            found[name][0].append(time.process_time() - start[0])
            found[name][1].append(time.perf_counter() - start[1])
        number += 1
        goes_on = torch.tensor([float(number < _LEAST or time.perf_counter() - began < seconds)])
        dist.broadcast(goes_on, 0)  # whole world, one number: ranks' clocks differ
    return found


def _stepper(config: Train, platform: Any) -> Callable[[], float]:
    """A whole step of the trainer, the next time that it is called; returns the loss."""
    from hp_muon_plugin.train import setup
    from hp_muon_plugin.train.loop import Trainer
    from hp_muon_plugin.train.progress import Silent

    setup.seed_everything(config.run.seed)
    vocabulary = config.model.vocab_multiple
    model, _ = setup.build_model(config, vocabulary, platform)
    optimizer = setup.build_optimizer(config, model)
    schedule = setup.build_schedule(config, optimizer)
    parts: dict[str, Any] = {"data": None, "platform": platform, "log": None, "display": Silent()}
    trainer = Trainer(config, model, optimizer, schedule, **parts)
    batches = _batches(config, platform)
    return lambda: trainer._step(batches)[0]


def _alone(config: Train, platform: Any) -> Callable[[], float]:
    """Forward and backward of the bare model: no wrapper, no optimizer, no communication."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from hp_muon_plugin.models.gpt import build_gpt, transformer_config

    core = transformer_config(config.model, config.topology, config.platform.precision)
    model = build_gpt(core, config.model, config.model.vocab_multiple).to(platform.device())
    batches, length = _batches(config, platform), config.model.seq_length
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool, device=platform.device()), diagonal=1)

    def mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return losses.float().mean(), {"loss": losses.detach().float().mean()}

    def forward(rows: Any, chunk: Any) -> Any:
        row = next(rows)
        return chunk(row.tokens, row.position_ids, mask, labels=row.labels), mean

    def step() -> float:
        model.zero_grad(set_to_none=True)
        reduced = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=batches,
            model=model,
            num_microbatches=1,
            seq_length=length,
            micro_batch_size=config.run.micro_batch_size,
            forward_only=False,
        )
        return float(reduced[0]["loss"])

    return step


def _batches(config: Train, platform: Any) -> Iterator[Any]:
    """Random tokens, the same ones for every contender."""
    from hp_muon_plugin.train.data import Batch

    size, length = config.run.micro_batch_size, config.model.seq_length
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    draw = functools.partial(torch.randint, config.model.vocab_multiple, (size, length + 1), generator=generator)
    positions = torch.arange(length).expand(size, -1)
    while True:
        tokens = draw()
        fields = (tokens[:, :-1], tokens[:, 1:], torch.ones(size, length), positions)
        yield Batch(*(tensor.contiguous().to(platform.device()) for tensor in fields))


def main() -> None:
    """Entry point of a rank."""
    die_with(int(os.environ[LAUNCHER]))
    plan = Plan(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    folder = Path(sys.argv[2])
    run_and_report(lambda: run_rank(plan, folder), folder)


if __name__ == "__main__":
    main()
