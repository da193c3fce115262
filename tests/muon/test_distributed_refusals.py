"""What is missing, bad or different on one rank is one answer on all, and never a hang."""

import os
import signal
import time
from typing import Any

import pytest
import torch
from dist_pool import joined, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.muon import build_optimizer
from hp_muon_plugin.platform.wire import C10dWire
from hp_muon_plugin.train.setup import Launch
from muon.sharded_weights import (
    Shapes,
    Weights,
    assert_close,
    built,
    filled,
    give_grads,
    model_of_weights,
    sharded,
    told,
    trained,
    whole_weights,
)

SHAPES: Shapes = {"wide": (24, 80), "tall": (72, 20), "square": (32, 32), "experts": (6, 8, 20), "bias": (7,)}
ONE, TWO = filled(1, SHAPES), filled(2, SHAPES)
STRATEGIES = ("auto", "allgather", "allgather_dedup", "alltoall", "gram")


def _grad(model: Weights, name: str) -> torch.Tensor:
    grad = model.get_parameter(name).grad
    assert grad is not None
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _run_missing(launch: Launch, layout: str) -> list[str]:
    reference = model_of_weights(SHAPES)
    alone = build_optimizer(reference)
    give_grads(reference, ONE)
    reference.get_parameter("layers.wide.weight").grad = None
    alone.step()
    expected = trained(reference, alone, [TWO])
    joined(launch)
    mesh = init_device_mesh("cpu", (launch.world_size,))
    errors = []
    for strategy in STRATEGIES:
        model = sharded(SHAPES, layout, mesh)
        optimizer = build_optimizer(model, strategy=strategy)
        wide = model.get_parameter("layers.wide.weight")
        before = whole_weights(model)
        give_grads(model, ONE)
        if launch.rank == 1:
            wide.grad = None
        errors.append(told(optimizer.step))
        assert all(torch.equal(value, before[name]) for name, value in whole_weights(model).items())
        assert not optimizer.state[wide]
        wide.grad = None
        optimizer.step()  # missing on all ranks: left alone
        assert torch.equal(whole_weights(model)["layers.wide.weight"], before["layers.wide.weight"])
        assert not optimizer.state[wide]
        assert_close(trained(model, optimizer, [TWO]), expected, strategy)
    wide.grad = None
    optimizer.config.missing_grad = "error"
    errors.append(told(optimizer.step))
    return errors


@pytest.mark.parametrize(("ranks", "layout"), [(2, "per_param"), (3, "fully_shard")])
def test_a_missing_gradient_is_left_alone_or_an_error_on_all(ranks: int, layout: str) -> None:
    answers = run_ranks(ranks, _run_missing, layout)
    assert answers == [answers[0]] * ranks
    *torn, missing = answers[0]
    for text in torn:
        assert text.startswith("GradientError: layers.wide.weight: gradient on some ranks and none on others"), text
    assert missing.startswith("GradientError: layers.wide.weight: no gradient (optimizer.missing_grad=error)")


def _run_bad(launch: Launch, value: float) -> list[str]:
    joined(launch)
    mesh = init_device_mesh("cpu", (launch.world_size,))
    answers = []
    for strategy in STRATEGIES:
        model, clean = sharded(SHAPES, "flat", mesh), sharded(SHAPES, "flat", mesh)
        optimizer = build_optimizer(model, strategy=strategy)
        trained(model, optimizer, [ONE])
        before = whole_weights(model)
        momenta = {p: state["momentum_buffer"].clone() for p, state in optimizer.state.items() if len(state) == 1}
        give_grads(model, TWO)
        if launch.rank == 1:
            filled_here = [p.grad for p in model.parameters() if p.grad is not None and p.grad.numel()]
            filled_here[0].view(-1)[0] = value
        optimizer.step()
        assert optimizer.skipped_steps == 1
        assert all(torch.equal(whole, before[name]) for name, whole in whole_weights(model).items())
        assert all(torch.equal(optimizer.state[p]["momentum_buffer"], m) for p, m in momenta.items())
        optimizer.config.non_finite = "error"
        answers.append(told(optimizer.step))
        unbroken = trained(clean, build_optimizer(clean, strategy=strategy), [ONE, TWO])
        found = trained(model, optimizer, [TWO])
        assert all(torch.equal(found[name], whole) for name, whole in unbroken.items()), strategy
    return answers


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_gradient_on_one_rank_changes_nothing_on_any(value: float) -> None:
    for answers in run_ranks(3, _run_bad, value):
        assert all(text.startswith("GradientError") and "NaN or infinite" in text for text in answers), answers


OPTIONS: dict[str, dict[str, Any]] = {
    "strategy": {"strategy": "gram"},
    "nesterov": {"nesterov": False},
    "lr": {"lr": 1e-3},
    "comm_dtype": {"comm_dtype": "bfloat16"},
    "schedule": {"schedule": "polar_express"},
    "scale": {"scale_factor": 2.0},
    "routes": {"adamw_params": ["layers.tall.weight"]},
    "all routes": {"adamw_params": ["*"]},
}


def _run_other_options(launch: Launch) -> dict[str, str]:
    joined(launch)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(SHAPES, "fully_shard", mesh)
    answers = {}
    for what, other in OPTIONS.items():
        options = other if launch.rank == 3 else {}
        answers[what] = told(lambda options=options: build_optimizer(model, **options))
    if launch.rank == 3:  # frozen on one rank, after it was sharded
        model.get_parameter("layers.square.weight").requires_grad_(False)
    answers["frozen"] = told(lambda: build_optimizer(model))
    model.layers = torch.nn.ModuleDict(reversed(model.layers.items()) if launch.rank == 3 else model.layers)
    answers["order"] = told(lambda: build_optimizer(model))
    whole = model_of_weights(SHAPES)  # as under DistributedDataParallel
    options = OPTIONS["nesterov"] if launch.rank == 3 else {}
    answers["whole"] = told(lambda: build_optimizer(whole, **options))
    return answers


def test_options_or_parameters_of_one_rank_are_named_on_all() -> None:
    """Also on ranks that share no axis with the one that differs, and where it alone has nothing for Muon."""
    answers = run_ranks(4, _run_other_options)
    assert answers == [answers[0]] * 4
    for what, text in answers[0].items():
        assert text.startswith(f"{ConfigError.__name__}: optimizer=rank 0 has "), (what, text)
        assert "rank 3 '" in text, (what, text)
    assert "'nesterov=True', rank 3 'nesterov=False'" in answers[0]["nesterov"]
    assert "'layers.square.weight: (32, 32) by muon, trainable=True'" in answers[0]["frozen"]


class _Failing(C10dWire):
    """Fails, or dies, at the second collective."""

    def __init__(self, is_killed: bool) -> None:
        super().__init__()
        self._is_killed, self._left = is_killed, 2

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0 and self._is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._left == 0:
            raise ValueError("out of luck")

    def all_gather(self, *args: Any) -> Any:
        self._count()
        return super().all_gather(*args)

    def all_to_all(self, *args: Any) -> Any:
        self._count()
        return super().all_to_all(*args)


def _run_until_failure(launch: Launch, strategy: str, is_killed: bool) -> tuple[str, float]:
    if is_killed and launch.rank == 1:  # the child is the rank; this process can still report
        child = os.fork()
        if child:
            return f"ended by signal {os.WTERMSIG(os.waitpid(child, 0)[1])}", 0.0
    joined(launch, timeout_s=8.0)
    mesh = init_device_mesh("cpu", (launch.world_size,))
    model = sharded(SHAPES, "per_param", mesh)
    wire = _Failing(is_killed) if launch.rank == 1 else C10dWire()
    optimizer = built(model, given={"wire": wire, "max_batch_bytes": 1}, strategy=strategy)
    give_grads(model, ONE)
    start = time.monotonic()
    text = told(optimizer.step)
    return text, time.monotonic() - start


@pytest.mark.parametrize(
    ("strategy", "is_killed"), [("allgather_dedup", False), ("alltoall", True), ("gram", False), ("gram", True)]
)
def test_a_rank_that_fails_or_dies_in_a_step_ends_the_others(strategy: str, is_killed: bool) -> None:
    """The others say what they were doing, at the latest when the process group's time is over."""
    answers = run_ranks(3, _run_until_failure, strategy, is_killed)
    assert answers[1][0] == ("ended by signal 9" if is_killed else "ValueError: out of luck")
    for text, seconds in (answers[0], answers[2]):
        assert text.startswith("RuntimeError: exchange of "), text
        assert "another rank ended, or waits for something else" in text
        assert seconds < 25.0
