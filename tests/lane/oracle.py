"""The float64 trajectory: a real model on one rank, its optimizer replaced by the reference."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from dist_pool import run_ranks
from made_once import computed_once

from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.config.trainer import Model
from hp_muon_plugin.layout.spec import plain_matrix
from hp_muon_plugin.muon.coefficients import resolve_schedule
from hp_muon_plugin.muon.reference import ReferenceAdamW, ReferenceMuon
from hp_muon_plugin.train.setup import Launch
from lane.harness import Ready, batches, build, specs_of, train_config
from lane.matrices import matrices_of


def _alone(launch: Launch, model: Model, optimizer: HpMuon | AdamW, batch: int, steps: int) -> dict[str, Any]:
    return train_with_oracle(build(launch, train_config(model, optimizer=optimizer, global_batch=batch)), steps)


@computed_once
def trained_by_oracle(model: Model, optimizer: HpMuon | AdamW, batch: int, steps: int) -> dict[str, Any]:
    """The trajectory of a model, the same for all tests that compare with it."""
    found: dict[str, Any] = run_ranks(1, _alone, model, optimizer, batch, steps)[0]
    return found


class _Matrices:
    """Muon on a weight that holds several matrices, each by itself."""

    def __init__(self, rows: list[list[int]], cols: int, rule: Callable[..., ReferenceMuon]) -> None:
        self._rules = [(part, rule(plain_matrix(len(part), cols))) for part in rows]

    def step(self, weight: torch.Tensor, grad: torch.Tensor, **options: float) -> torch.Tensor:
        updated = torch.full_like(weight, float("nan"), dtype=torch.float64)
        for rows, rule in self._rules:
            updated[rows] = rule.step(weight[rows], grad[rows], **options)
        return updated


def train_with_oracle(ready: Ready, steps: int) -> dict[str, Any]:
    """Train on one rank; every update is computed in float64 and rounded once into the weight."""
    options = ready.config.optimizer
    specs = specs_of(ready)
    is_muon = isinstance(options, HpMuon)
    coefficients = resolve_schedule(options.schedule, steps=options.steps) if is_muon else []
    rules: dict[torch.nn.Parameter, Any] = {}
    muon = partial(ReferenceMuon, coefficients=coefficients)
    if is_muon:
        muon = partial(
            muon,
            momentum=options.momentum,
            nesterov=options.nesterov,
            scale=options.scale,
            factor=options.scale_factor,
        )
    for param, spec in specs.items():
        matrices = matrices_of(spec.name, param.shape[0], ready.config.model) if is_muon else None
        if matrices is not None:
            rules[param] = _Matrices(matrices, param.shape[1], muon)
        else:
            scalar = options.adamw if is_muon else options
            beta1, beta2 = scalar.betas
            rules[param] = ReferenceAdamW((beta1, beta2), scalar.eps)
    stream, norms, losses = batches(ready.config, 0, 1), [], []
    for _ in range(steps):
        ready.model.zero_grad_buffer()
        losses.append(float(ready.trainer._forward_backward(stream, forward_only=False)))
        grads = {param: param.main_grad.double() for param in specs}
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))
        norms.append(norm)
        factor = min(1.0, options.clip_grad / (norm + 1e-6)) if options.clip_grad else 1.0
        lr = {group.get("algorithm", "adamw"): group["lr"] for group in ready.optimizer.param_groups}
        with torch.no_grad():
            for param, rule in rules.items():
                decay = options.weight_decay if param.dim() > 1 else 0.0
                kind = "muon" if isinstance(rule, _Matrices) else "adamw"
                param.copy_(rule.step(param, grads[param] * factor, lr=lr[kind], weight_decay=decay))
        ready.schedule.step(increment=1)
    weights = {spec.name: param.detach().clone() for param, spec in specs.items()}
    return {"weights": weights, "norms": norms, "losses": losses}
