"""The float64 trajectory: a real model on one rank, its optimizer replaced by the reference."""

import math
from typing import Any

import torch
from dist_pool import run_ranks
from made_once import computed_once

from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.config.trainer import Model
from hp_muon_plugin.muon.coefficients import resolve_schedule
from hp_muon_plugin.muon.reference import ReferenceAdamW, ReferenceMuon
from hp_muon_plugin.muon.routing import Algorithm, default_route
from hp_muon_plugin.train.setup import Launch
from lane.harness import Ready, batches, build, specs_of, train_config


def _alone(launch: Launch, model: Model, optimizer: HpMuon | AdamW, batch: int, steps: int) -> dict[str, Any]:
    return train_with_oracle(build(launch, train_config(model, optimizer=optimizer, global_batch=batch)), steps)


@computed_once
def trained_by_oracle(model: Model, optimizer: HpMuon | AdamW, batch: int, steps: int) -> dict[str, Any]:
    """The trajectory of a model, the same for all tests that compare with it."""
    found: dict[str, Any] = run_ranks(1, _alone, model, optimizer, batch, steps)[0]
    return found


def train_with_oracle(ready: Ready, steps: int) -> dict[str, Any]:
    """Train on one rank; every update is computed in float64 and rounded once into the weight."""
    options = ready.config.optimizer
    specs = specs_of(ready)
    is_muon = isinstance(options, HpMuon)
    coefficients = resolve_schedule(options.schedule, steps=options.steps) if is_muon else []
    rules: dict[torch.nn.Parameter, Any] = {}
    for param, spec in specs.items():
        if is_muon and default_route(spec)[0] is Algorithm.muon:
            assert spec.view is not None
            rules[param] = ReferenceMuon(
                spec.view,
                coefficients,
                momentum=options.momentum,
                nesterov=options.nesterov,
                scale=options.scale,
                factor=options.scale_factor,
            )
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
                kind = "muon" if isinstance(rule, ReferenceMuon) else "adamw"
                param.copy_(rule.step(param, grads[param] * factor, lr=lr[kind], weight_decay=decay))
        ready.schedule.step(increment=1)
    weights = {spec.name: param.detach().clone() for param, spec in specs.items()}
    return {"weights": weights, "norms": norms, "losses": losses}
