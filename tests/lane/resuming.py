"""Parts of runs that save and resume, each on ranks of its own."""

from dataclasses import dataclass
from pathlib import Path

import torch
from dist_pool import run_ranks

from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.train.setup import Launch
from lane.harness import VOCAB, batches, build, whole_weights


@dataclass
class Outcome:
    """What one part of a run ended with.

    Attributes:
        begin: Steps done before it.
        losses: Of its steps.
        weights: Whole weights after it; of rank 0 alone.
        random: Numbers that this rank drew during it, one in each step.
        state: What this rank holds of the optimizer's state after it, by kind and name.
    """

    begin: int
    losses: list[float]
    weights: dict[str, torch.Tensor]
    random: list[float]
    state: dict[str, torch.Tensor]


def part(launch: Launch, config: Train, stop: int) -> Outcome:
    from hp_muon_plugin.megatron.held import held_params
    from hp_muon_plugin.train.checkpoints import Checkpoints
    from hp_muon_plugin.train.data import TrainingData

    ready = build(launch, config)
    torch.manual_seed(launch.rank)  # ranks that draw differently get back what they had
    checkpoints = Checkpoints(
        config,
        Path("unused"),
        ready.model,
        ready.optimizer,
        ready.schedule,
        data=TrainingData(train=None, held_out=None, vocab_size=VOCAB, num_tokens=0, unigram_nats=0.0),
        device=torch.device("cpu"),
    )
    progress = checkpoints.resume()
    begin = progress.step
    stream = batches(config, ready.trainer._dp_rank, ready.trainer._dp_size, first_step=begin)
    drawn = list[float]()
    while progress.step < stop:
        progress.step += 1
        progress.consumed_samples += config.run.global_batch_size
        ready.losses.append(ready.trainer._step(stream)[0])
        drawn.append(float(torch.rand(())))
        checkpoints.after_step(progress)
    weights = whole_weights(ready)
    state = {
        f"{kind}/{held.name}": tensor.clone()
        for held in held_params([ready.model], ready.optimizer)
        for kind, tensor in (held.state or {}).items()
    }
    return Outcome(begin, ready.losses, weights if launch.rank == 0 else {}, drawn, state)


def run(ranks: int, config: Train, stop: int) -> list[Outcome]:
    found: list[Outcome] = run_ranks(ranks, part, config, stop)
    return found
