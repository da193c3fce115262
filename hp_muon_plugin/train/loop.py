"""The training loop: Megatron's forward-backward, the optimizer, metrics, evaluation."""

import functools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.errors import DivergenceError
from hp_muon_plugin.platform.base import Platform
from hp_muon_plugin.platform.collectives import sum_over_ranks
from hp_muon_plugin.train.checkpoints import Checkpoints, Progress
from hp_muon_plugin.train.data import Batch, TrainingData, micro_batches
from hp_muon_plugin.train.instruments import FORWARD_BACKWARD, OPTIMIZER
from hp_muon_plugin.train.metrics import MetricLog
from hp_muon_plugin.train.monitor import Monitor
from hp_muon_plugin.train.progress import Display

_MAX_BAD_IN_A_ROW = 20
_FIX = "lower optimizer.lr, or look for the layer that overflows"


@dataclass(slots=True)
class Result:
    """What a run ended with; every rank holds it.

    Attributes:
        losses: Training loss (nats per token) of every step.
        held_out: Held-out loss after each evaluated step.
        num_skipped: Steps left out because of a NaN or infinite gradient, before a checkpoint too.
        is_interrupted: Whether the run was asked to end, and has saved a checkpoint.
    """

    losses: list[float] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)
    num_skipped: int = 0
    is_interrupted: bool = False


class Trainer:
    """One run on one rank. All methods are collective.

    Args:
        config: Options.
        model: Wrapped model chunk of this pipeline stage.
        optimizer: A MegatronOptimizer.
        schedule: An OptimizerParamScheduler.
        data: Datasets.
        platform: Platform.
        log: Metric sinks, on rank 0.
        display: Progress display.
        checkpoints: Saves and resumes; None does neither.
    """

    def __init__(
        self,
        config: Train,
        model: Any,
        optimizer: Any,
        schedule: Any,
        *,
        data: TrainingData,
        platform: Platform,
        log: MetricLog | None,
        display: Display,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self._config = config
        self._model = model
        self._optimizer = optimizer
        self._schedule = schedule
        self._data = data
        self._platform = platform
        self._log = log
        self._display = display
        self._checkpoints = checkpoints
        self._dp_rank = parallel_state.get_data_parallel_rank()
        self._dp_size = parallel_state.get_data_parallel_world_size()
        length = config.model.seq_length
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=platform.device())
        self._monitor = Monitor(config, [model], optimizer, platform.device())
        self._measured: dict[str, float] = {}
        self._causal_mask = torch.triu(mask, diagonal=1)  # (1, 1, S, S) bool, True = hidden

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per step on each rank."""
        run = self._config.run
        return run.global_batch_size // (run.micro_batch_size * int(self._dp_size))

    def train(self) -> Result:
        """Run all steps, from where a checkpoint ended.

        Returns:
            Losses and held-out losses of this part of the run.

        Raises:
            DivergenceError: If 20 steps in a row had a loss or a gradient that is not finite, or the
                last held-out loss is not.
        """
        run, result = self._config.run, Result()
        progress = Progress() if self._checkpoints is None else self._checkpoints.resume()
        batches = self._batches(self._data.train, first_sample=progress.consumed_samples)
        is_done = progress.step >= run.steps
        while progress.step < run.steps:
            progress.step += 1
            self._train_step(batches, progress, result)
            if progress.step % run.eval_interval == 0 or progress.step == run.steps:
                self._hold_out(progress.step, result)
            if self._checkpoints is not None and self._checkpoints.after_step(progress):
                result.is_interrupted = True
                return result
        result.num_skipped = progress.num_skipped
        if run.steps not in result.held_out:  # the checkpoint was of the last step
            self._hold_out(run.steps, result)
        if not math.isfinite(result.held_out[run.steps]):
            raise DivergenceError(
                f"the held-out loss after the last step is {result.held_out[run.steps]}\n  fix: {_FIX}"
            )
        if is_done:
            self._display.line(
                f"nothing was left to train: the checkpoint is of step {progress.step}; raise run.steps={run.steps}"
            )
        return result

    def _train_step(self, batches: Iterator[Batch], progress: Progress, result: Result) -> None:
        step, began = progress.step, time.perf_counter()
        self._monitor.begin(step)
        loss, succeeded, norm, optimizer_ms = self._step(batches)
        result.losses.append(loss)
        progress.num_skipped += not succeeded
        progress.consumed_samples += self._config.run.global_batch_size
        seconds = time.perf_counter() - began
        self._report(step, loss, norm, seconds, optimizer_ms, succeeded)
        progress.num_bad = 0 if succeeded and math.isfinite(loss) else progress.num_bad + 1
        if progress.num_bad == _MAX_BAD_IN_A_ROW:
            raise DivergenceError(
                f"{progress.num_bad} steps in a row had a NaN or infinite loss, gradient or gradient norm; the last "
                f"one was step {step}\n"
                f"  fix: {_FIX}"
            )

    def _hold_out(self, step: int, result: Result) -> None:
        result.held_out[step] = self.evaluate()
        self._report_held_out(step, result.held_out[step])

    def evaluate(self) -> float:
        """Loss on the held-out text, in nats per token; every rank holds it."""
        batches = self._batches(self._data.held_out, first_sample=0)
        self._model.eval()
        with torch.no_grad():
            losses = [
                float(self._forward_backward(batches, forward_only=True)) for _ in range(self._config.run.eval_batches)
            ]
        self._model.train()
        return math.fsum(losses) / len(losses)

    def _step(self, batches: Iterator[Batch]) -> tuple[float, bool, float | None, float]:
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        with self._monitor.phase(FORWARD_BACKWARD):
            loss = self._forward_backward(batches, forward_only=False)
        self._monitor.before_update()
        self._platform.synchronize()
        began = time.perf_counter()
        with self._monitor.phase(OPTIMIZER):
            succeeded, norm, _ = self._optimizer.step()
            self._platform.synchronize()
        optimizer_ms = 1e3 * (time.perf_counter() - began)
        value, self._measured = self._monitor.read(
            loss, is_updated=bool(succeeded)
        )  # before the schedule writes the next learning rate
        if succeeded:
            self._schedule.step(increment=1)
        return value, bool(succeeded), None if norm is None else float(norm), optimizer_ms

    def _forward_backward(self, batches: Iterator[Batch], *, forward_only: bool) -> torch.Tensor:
        """Mean loss over the whole batch, ``(1,)`` float32 on the device of every rank."""
        run = get_forward_backward_func()
        reduced = run(
            forward_step_func=self._forward_step,
            data_iterator=batches,
            model=self._model,
            num_microbatches=self.num_micro_batches,
            seq_length=self._config.model.seq_length,
            micro_batch_size=self._config.run.micro_batch_size,
            forward_only=forward_only,
        )
        own = torch.stack([entry["loss"] for entry in reduced]).mean() if reduced else torch.zeros(())
        # Only last stages have a loss, and tensor-parallel ranks have the same one: the sum over all
        # ranks is the mean loss times (data-parallel ranks * tensor-parallel ranks). One float32.
        total = own.float().to(self._platform.device()).reshape(1)
        sum_over_ranks(total, "losses")
        return total.div_(self._dp_size * parallel_state.get_tensor_model_parallel_world_size())

    def _forward_step(self, batches: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        mask = self._causal_mask if batch.attention_mask is None else batch.attention_mask
        losses = model(batch.tokens, batch.position_ids, mask, labels=batch.labels)
        return losses, functools.partial(_mean_loss, batch.loss_mask)

    def _batches(self, dataset: Any, *, first_sample: int) -> Iterator[Batch]:
        return micro_batches(
            dataset,
            self._config,
            first_sample=first_sample,
            dp_rank=self._dp_rank,
            dp_size=self._dp_size,
            device=self._platform.device(),
        )

    def _report(
        self, step: int, loss: float, norm: float | None, seconds: float, optimizer_ms: float, succeeded: bool
    ) -> None:
        run = self._config.run
        tokens = run.global_batch_size * self._config.model.seq_length / seconds
        memory = self._platform.memory_bytes() / 2**20
        is_logged = step % run.log_interval == 0 or step in (1, run.steps) or not succeeded
        values = f"loss {loss:.4f}  {tokens:,.0f} tokens/s  optimizer {optimizer_ms:.1f} ms  {memory:,.0f} MiB"
        self._display.update(step, values if succeeded else f"{values}  SKIPPED", is_logged=is_logged)
        if self._log is not None:
            rates = {f"lr/{g.get('algorithm', 'adamw')}": g["lr"] for g in self._optimizer.param_groups if g["params"]}
            self._log.write(
                step,
                {
                    "loss/train": loss,
                    "grad_norm": norm,
                    "skipped": int(not succeeded),
                    "throughput/tokens_per_s": round(tokens, 1),
                    "optim/step_ms": round(optimizer_ms, 3),
                    "memory/rank0_mib": round(memory, 1),
                    **rates,
                    **self._measured,
                },
            )

    def _report_held_out(self, step: int, loss: float) -> None:
        self._display.line(
            f"step {step}: held-out loss {loss:.4f} nats/token "
            f"(unigram entropy of the text: {self._data.unigram_nats:.4f})"
        )
        if self._log is not None:
            self._log.write(step, {"loss/held_out": loss, "loss/unigram_entropy": self._data.unigram_nats})


def _mean_loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean loss of the counted tokens: losses and mask are ``(B, S)``."""
    mean = (losses.float() * mask).sum() / mask.sum().clamp(min=1)
    return mean, {"loss": mean.detach().clone()}  # the schedule divides the first one in place
