"""``overlap_backward``: exchanges begin while backward runs, and nothing else differs."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from dist_pool import joined, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.fsdp import hp_fully_shard
from hp_muon_plugin.fsdp.roots import no_sync
from hp_muon_plugin.muon import build_optimizer
from hp_muon_plugin.muon.distributed.optimizer import ShardedMuonOptimizer
from hp_muon_plugin.muon.distributed.shards import LISTEN
from hp_muon_plugin.platform.counting import CountingWire
from hp_muon_plugin.platform.protocol import Handle, Wire
from hp_muon_plugin.platform.strict import StrictWire
from hp_muon_plugin.platform.wire import C10dWire
from hp_muon_plugin.train.setup import Launch
from muon.sharded_weights import built, told, whole_weights

WIDTH, LAYERS, STEPS = 12, 3, 2
STRATEGIES = ("auto", "allgather", "allgather_dedup", "alltoall", "gram")
OPTIONS: dict[str, Any] = {"lr": 0.02, "clip_grad": 0.05, "clip_mode": "adamw_only"}


class Layers(nn.Module):
    """Layers whose matrices ranks cut, a weight that no input reaches, and an output."""

    def __init__(self, *, is_integer: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {"up": nn.Linear(WIDTH, 32, bias=not number), "down": nn.Linear(32, WIDTH, bias=False)}  # cut in a row
            )
            for number in range(LAYERS)
        )
        self.unused = nn.Linear(WIDTH, 5)
        self.output = nn.Linear(WIDTH, 7)
        generator = torch.Generator().manual_seed(3)
        for param in self.parameters():
            if is_integer:
                param.data.copy_(torch.randint(-1, 2, param.shape, generator=generator))
            else:
                param.data.copy_(0.3 * torch.randn(param.shape, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer["down"](torch.relu(layer["up"](x)))
        return self.output(x)


class Recording:
    """Tells in what order collectives are issued and waited for."""

    def __init__(self, wire: Wire, who: str, log: list[tuple[str, str, str]]) -> None:
        self._wire, self._who, self._log = wire, who, log

    def expect(self, *args: Any, **kwargs: Any) -> Any:
        return self._wire.expect(*args, **kwargs)

    def __getattr__(self, kind: str) -> Callable[..., Handle]:
        def call(*args: Any, **kwargs: Any) -> Handle:
            self._log.append((self._who, kind, "begins"))
            return _Recorded(getattr(self._wire, kind)(*args, **kwargs), (self._who, kind, "ends"), self._log)

        return call


@dataclass
class _Recorded:
    inner: Handle
    event: tuple[str, str, str]
    log: list[tuple[str, str, str]]

    def wait(self) -> None:
        self.inner.wait()
        self.log.append(self.event)


@dataclass
class Run:
    """A model, its optimizer, and what its messages are."""

    launch: Launch
    model: Layers
    optimizer: ShardedMuonOptimizer
    counting: CountingWire
    wires: list[Wire]
    is_integer: bool
    was_early: list[bool] = field(default_factory=list)

    def backward(self, step: int, micro: int = 0) -> None:
        generator = torch.Generator().manual_seed(1000 * step + 10 * micro + self.launch.rank)
        if self.is_integer:
            self.model(torch.randint(-2, 3, (4, WIDTH), generator=generator).float()).sum().backward()
        else:
            self.model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()

    def step(self, step: int, *, micros: int = 1, syncs_all: bool = False) -> None:
        self.optimizer.zero_grad()
        for micro in range(micros):
            with contextlib.nullcontext() if syncs_all or micro == micros - 1 else no_sync(self.model):
                self.backward(step, micro)
        self.was_early.append(self.optimizer.has_begun)
        self.optimizer.step()

    def left(self) -> dict[str, torch.Tensor]:
        """All that training leaves: whole weights, and this rank's state."""
        state = {
            f"{self.optimizer.specs[param].name} {key}": value.clone()
            for param, held in self.optimizer.state.items()
            for key, value in held.items()
        }
        return whole_weights(self.model) | state

    def verify(self) -> None:
        for wire in self.wires:
            if isinstance(wire, StrictWire):
                wire.verify()


def _run(
    launch: Launch,
    overlap: bool,
    *,
    replicas: int = 1,
    outer: str = "replicate",
    is_strict: bool = False,
    is_integer: bool = False,
    log: list[tuple[str, str, str]] | None = None,
    **options: Any,
) -> Run:
    counting = CountingWire(C10dWire())
    wires: list[Wire] = [C10dWire(), counting]
    if is_strict:
        wires = [StrictWire(wire) for wire in wires]
    if log is not None:
        wires = [Recording(wire, who, log) for wire, who in zip(wires, ("engine", "muon"), strict=True)]  # type: ignore[misc]
    model, shards = Layers(is_integer=is_integer), launch.world_size // replicas
    shape, names = ((replicas, shards), ("replicate", "shard")) if replicas > 1 else ((shards,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.layers:
        for part in layer.values():
            hp_fully_shard(part, mesh, wire=wires[0])
    hp_fully_shard(model, mesh, outer=outer, outer_bucket_bytes=1, wire=wires[0])
    return Run(launch, model, _optimizer(model, wires[1], overlap, **options), counting, wires, is_integer)


def _optimizer(model: nn.Module, wire: Wire, overlap: bool, **options: Any) -> ShardedMuonOptimizer:
    given = {"wire": wire, "max_batch_bytes": 1, "listen": getattr(model, LISTEN)}
    return built(model, given=given, overlap_backward=overlap, **(OPTIONS | options))


def _both(
    launch: Launch, train: Callable[[Run], None], *, is_traffic_equal: bool = True, **options: Any
) -> tuple[Run, Run]:
    """Train with and without; all that is left is equal to the bit."""
    on, off = (_run(launch, overlap, **options) for overlap in (True, False))
    for run in (on, off):
        train(run)
        run.verify()
    found, wanted = on.left(), off.left()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    assert not any(off.was_early)
    assert off.counting.counts()
    assert not is_traffic_equal or on.counting.counts() == off.counting.counts()
    return on, off


def _every_strategy(launch: Launch, replicas: int, options: dict[str, Any]) -> None:
    joined(launch)

    def train(run: Run) -> None:
        for step in range(STEPS):
            run.step(step, micros=2)

    for outer in ("replicate", "broadcast", "shard") if replicas > 1 else ("replicate",):
        for strategy in STRATEGIES:
            on, _ = _both(launch, train, replicas=replicas, outer=outer, strategy=strategy, **options)
            assert on.was_early == [True] * STEPS, (outer, strategy)


@pytest.mark.parametrize(
    ("ranks", "replicas", "options"),
    [
        (2, 1, {"is_strict": True}),
        (3, 1, {"is_integer": True}),
        (4, 1, {"momentum_dtype": "bfloat16"}),
        (4, 2, {"divide_replicas": True}),
    ],
    ids=["2", "3-integer", "4-bf16", "2x2"],
)
def test_weights_state_and_traffic_are_those_without(ranks: int, replicas: int, options: dict[str, Any]) -> None:
    run_ranks(ranks, _every_strategy, replicas, options)


def _alone(launch: Launch) -> None:
    joined(launch)
    off, on = (_run(launch, overlap) for overlap in (False, True))
    for run in (off, on):
        run.step(0)
    assert on.was_early == [False]  # one rank holds all
    assert all(torch.equal(value, on.left()[name]) for name, value in off.left().items())


def test_one_rank_has_nothing_to_begin() -> None:
    run_ranks(1, _alone)


def _recorded(launch: Launch, replicas: int, outer: str, strategy: str) -> list[tuple[str, str, str]]:
    joined(launch)
    log: list[tuple[str, str, str]] = []
    run = _run(launch, True, replicas=replicas, outer=outer, strategy=strategy, log=log)
    log.clear()
    run.backward(0)
    log.append(("backward", "", "ends"))
    run.optimizer.step()
    return log


_SUM = {"replicate": "all_reduce", "shard": "reduce"}


@pytest.mark.parametrize(
    ("strategy", "messages"),
    [("alltoall", ["all_to_all"]), ("allgather_dedup", ["all_gather"]), ("gram", ["all_gather", "reduce_scatter"])],
)
def test_exchanges_begin_before_the_last_gradients_are_reduced(strategy: str, messages: list[str]) -> None:
    for log in run_ranks(2, _recorded, 1, "replicate", strategy):
        last = max(place for place, event in enumerate(log) if event == ("engine", "reduce_scatter", "begins"))
        assert last < log.index(("backward", "", "ends"))
        for kind in messages:
            assert log.index(("muon", kind, "begins")) < last


@pytest.mark.parametrize("outer", ["replicate", "shard"])
def test_exchanges_begin_while_replicas_still_sum(outer: str) -> None:
    for log in run_ranks(4, _recorded, 2, outer, "alltoall"):
        last = max(place for place, event in enumerate(log) if event == ("engine", _SUM[outer], "ends"))
        assert log.index(("muon", "all_to_all", "begins")) < last < log.index(("backward", "", "ends"))


def _interrupted(launch: Launch, strategy: str) -> None:
    """Steps that do not come, or not with the first gradients; a second optimizer goes on from the state."""
    joined(launch)

    def train(run: Run) -> None:
        run.step(0, micros=2, syncs_all=True)  # the second pass adds to what the first began with
        run.backward(1)
        run.optimizer.zero_grad()  # never stepped
        assert not run.optimizer.has_begun
        run.backward(2)
        with torch.no_grad():
            run.model(torch.ones(2, WIDTH))  # evaluation between backward and step
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.backward(3)
        grad = next(p.grad for p in run.model.output.parameters() if p.grad is not None)
        if launch.rank == 0:
            grad.fill_(torch.nan)
        run.optimizer.step()
        assert run.optimizer.skipped_steps == 1
        assert not run.optimizer.has_begun
        state = run.optimizer.state_dict()
        wire, overlaps = run.wires[1], run.optimizer.config.overlap_backward
        run.optimizer = _optimizer(run.model, wire, overlaps, strategy=strategy)
        run.optimizer.load_state_dict(state)
        run.step(4)

    on, _ = _both(launch, train, is_traffic_equal=False, strategy=strategy, is_strict=True)
    assert on.was_early == [True] * 2


@pytest.mark.parametrize("strategy", ["alltoall", "gram"])
def test_steps_that_do_not_come_leave_nothing(strategy: str) -> None:
    run_ranks(2, _interrupted, strategy)


def _failing(launch: Launch) -> None:
    joined(launch)
    run = _run(launch, True, strategy="alltoall", is_strict=True)
    run.step(0)
    before = {name: value for name, value in run.left().items() if name.endswith("momentum_buffer")}

    def fail(grad: torch.Tensor) -> None:
        assert run.optimizer.has_begun
        raise ArithmeticError("in backward")

    x = torch.ones(2, WIDTH, requires_grad=True)
    x.register_hook(fail)
    with pytest.raises(ArithmeticError):
        run.model(x).sum().backward()
    run.optimizer.zero_grad()
    assert not run.optimizer.has_begun
    momenta = {name: run.optimizer.state[p]["momentum_buffer"] for p, name in _named(run) if name in before}
    assert momenta.keys() == before.keys() != set()
    assert all(torch.equal(momenta[name], value) for name, value in before.items())


def _named(run: Run) -> list[tuple[torch.nn.Parameter, str]]:
    return [(p, f"{run.optimizer.specs[p].name} momentum_buffer") for p in run.optimizer.state]


def test_a_backward_that_fails_leaves_momenta_as_they_were() -> None:
    run_ranks(2, _failing)


def _changed(launch: Launch) -> list[str]:
    joined(launch)
    found = []
    for change in ("scale", "replace", "drop", "momentum"):
        run = _run(launch, True, strategy="alltoall")
        run.backward(0)
        for group in run.optimizer.param_groups:
            if change == "momentum" and group["algorithm"] == "muon":
                group["momentum"] = 0.5
            for param in group["params"]:
                if param.grad is not None and change == "scale":
                    param.grad.mul_(0.5)
                elif param.grad is not None and change == "replace":
                    param.grad = param.grad.clone()
                elif change == "drop":
                    param.grad = None
        found.append(told(run.optimizer.step))
        assert not run.optimizer.has_begun
    return found


def test_gradients_and_momentum_that_change_after_backward_are_refused() -> None:
    for rank in run_ranks(2, _changed):
        for text in rank:
            assert text.startswith("GradientError: layers.2.")
            assert "was changed between backward and step()" in text
            assert "set optimizer.overlap_backward=false" in text


def _other_models(launch: Launch) -> list[str]:
    joined(launch)
    mesh = init_device_mesh("cpu", (2,))
    sharded = fully_shard(nn.Linear(8, 8), mesh=mesh)
    whole = nn.Linear(8, 8)
    ours = hp_fully_shard(nn.Linear(8, 8), mesh)
    build_optimizer(ours, overlap_backward=True, **OPTIONS)
    clipping = told(lambda: build_optimizer(ours, overlap_backward=True))
    return [
        clipping,
        *(told(lambda m=m: build_optimizer(m, overlap_backward=True, **OPTIONS)) for m in (sharded, whole)),
    ]


def test_other_models_and_clipping_are_refused() -> None:
    clipping, *others = run_ranks(2, _other_models)[0]
    assert clipping.startswith("ConfigError: optimizer.overlap_backward=true: ")
    assert "and optimizer.clip_grad=1 scales them by it\n  fix: set optimizer.clip_mode=adamw_only" in clipping
    for text in others:
        assert text.startswith("ConfigError: optimizer.overlap_backward=true with ")
        assert "fix: set optimizer.overlap_backward=false, or shard the model with hp_fully_shard" in text
    with pytest.raises(ConfigError, match=r"optimizer\.overlap_backward=true with a model that is not sharded"):
        build_optimizer(nn.Linear(8, 8), overlap_backward=True, clip_grad=0.0)
