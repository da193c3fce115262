"""Parameters that some or all ranks leave out of a step: as DistributedDataParallel and fully_shard train them."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hp_muon_plugin.errors import GradientError
from hp_muon_plugin.fsdp import MixedPrecision, hp_fully_shard
from hp_muon_plugin.fsdp import outer as outer_module
from hp_muon_plugin.fsdp.roots import no_sync, set_requires_all_reduce
from hp_muon_plugin.fsdp.whole import full_state_dict
from hp_muon_plugin.muon import build_optimizer
from hp_muon_plugin.platform.counting import CountingWire
from hp_muon_plugin.platform.wire import C10dWire
from hp_muon_plugin.train.setup import Launch
from tests.dist_pool import joined, run_ranks

WIDTH = 5
Uses = Callable[[int, int], bool]  # of a rank, and of the number of ranks
_NONE: Uses = lambda rank, size: False  # noqa: E731
_ALL: Uses = lambda rank, size: True  # noqa: E731
_FIRST: Uses = lambda rank, size: rank == 0  # noqa: E731
_LAST: Uses = lambda rank, size: rank == size - 1  # noqa: E731
# for each step, for each of two micro-batches: who takes the branch, and who runs the layer: all ranks or none, as the
# weights of a unit are gathered where it runs
STEPS: list[list[tuple[Uses, Uses]]] = [
    [(_NONE, _NONE), (_NONE, _NONE)],
    [(_FIRST, _NONE), (_NONE, _NONE)],
    [(_NONE, _NONE), (_LAST, _ALL)],
    [(_LAST, _ALL), (_FIRST, _NONE)],
    [(_NONE, _NONE), (_NONE, _NONE)],  # with state of the optimizer
    [(_ALL, _NONE), (_ALL, _ALL)],
    [(_NONE, _ALL), (_NONE, _NONE)],
]


class Layer(nn.Module):
    """A layer with a branch that is not always taken, experts that most ranks hold none of, a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.Parameter(0.3 * torch.randn(2, WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: torch.Tensor, is_taken: bool) -> torch.Tensor:
        y = torch.tanh(self.always(x))
        if is_taken:
            y = y + self.scale * self.branch(x @ self.experts[0] @ self.experts[1])
        return x + y


class Branches(nn.Module):
    """A layer that is used in parts, one that is used or not, one that never is, and weights of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.never = nn.Parameter(torch.ones(3, 2))
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, takes_branch: bool, runs_layer: bool) -> torch.Tensor:
        x = self.layers[0](x, takes_branch)
        if runs_layer:
            x = self.layers[1](x, True)
        return self.last(x)


def _model() -> Branches:
    torch.manual_seed(5)
    return Branches()


def _sharded(mesh: Any, *, outer: str = "replicate", **options: Any) -> nn.Module:
    model = _model()
    for layer in model.layers:
        hp_fully_shard(layer, mesh, **options)
    return hp_fully_shard(model, mesh, outer=outer, **options)


def _backward(model: nn.Module, step: int, micro: int, uses: tuple[Uses, Uses], launch: Launch) -> None:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + launch.rank)
    x = torch.randn(3, WIDTH, generator=generator)
    model(x, *(use(launch.rank, launch.world_size) for use in uses)).square().mean().backward()


def _parts(parameter: nn.Parameter) -> tuple[int, torch.Tensor | None]:
    """Where a parameter of ours begins on this rank, and its gradient."""
    grad = parameter.grad
    return parameter.hp_shard.start, None if grad is None else grad.detach().reshape(-1).float()


def _whole_grads(model: nn.Module, group: dist.ProcessGroup | None) -> dict[str, torch.Tensor | None]:
    """Gradients of a sharded model, None where no rank of the group that holds some of one has it; never some."""
    found: dict[str, torch.Tensor | None] = {}
    for name, parameter in model.named_parameters():
        own = (parameter.numel(), *_parts(parameter))
        every: list[Any] = [own]
        if group is not None:
            every = [None] * dist.get_world_size(group)
            dist.all_gather_object(every, own, group=group)
        held = [(start, grad) for numel, start, grad in every if numel]
        assert len({grad is None for _, grad in held}) == 1, (name, every)
        is_missing = held[0][1] is None
        parts = sorted(held, key=lambda part: part[0])
        found[name] = None if is_missing else torch.cat([grad for _, grad in parts])
    return found


def _compare(model: nn.Module, reference: nn.Module, group: Any, what: object, tolerance: float) -> int:
    """How many parameters have no gradient in either."""
    found = _whole_grads(model, group)
    for name, parameter in reference.named_parameters():
        ours, theirs = found[name.removeprefix("module.")], parameter.grad
        assert (ours is None) == (theirs is None), (what, name, ours, theirs)
        if ours is not None and theirs is not None:
            whole = theirs.full_tensor() if hasattr(theirs, "full_tensor") else theirs
            assert torch.allclose(ours, whole.reshape(-1), rtol=tolerance, atol=tolerance), (what, name)
    return sum(grad is None for grad in found.values())


def _accumulating(model: nn.Module, how: str) -> Any:
    if how == "each" or (how == "partial" and not hasattr(model, "_hp_fsdp_unit")):
        return contextlib.nullcontext()
    return model.no_sync() if isinstance(model, DistributedDataParallel) else no_sync(model)


def _train(launch: Launch, how: str, options: dict[str, Any], replicas: int) -> list[int]:
    joined(launch)
    shards = launch.world_size // replicas
    mesh = init_device_mesh("cpu", (replicas, shards) if replicas > 1 else (shards,))
    model, reference = _sharded(mesh, **options), DistributedDataParallel(_model(), find_unused_parameters=True)
    group = mesh.get_group(1) if replicas > 1 else mesh.get_group()
    pairs = [(m, torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.5)) for m in (model, reference)]
    owns = options.get("outer", "replicate") != "replicate"
    absent = []
    for step, micros in enumerate(STEPS):
        for each, optimizer in pairs:
            optimizer.zero_grad()
            for micro, uses in enumerate(micros):
                is_last = micro == len(micros) - 1
                if how == "partial" and each is model:
                    set_requires_all_reduce(model, is_last)
                with contextlib.nullcontext() if is_last else _accumulating(each, how):
                    _backward(each, step, micro, uses, launch)
        if not owns:  # else gradients are on other replicas, and the weights tell
            absent.append(_compare(model, reference, group, (step, how), 1e-5))
        for _, optimizer in pairs:
            optimizer.step()
    weights = full_state_dict(model)
    for name, parameter in reference.module.named_parameters():
        assert torch.allclose(weights[name], parameter, rtol=1e-5, atol=1e-5), name
    return absent


ABSENT = [17, 13, 7, 7, 17, 7, 11]
"""Of 21: a layer and a weight that nothing uses; 4 of a branch and 6 of a layer that are used in some steps."""


@pytest.mark.parametrize("how", ["no_sync", "each"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_as_ddp_that_finds_unused_parameters(world_size: int, how: str) -> None:
    """Gradients of parameters that no rank used were zeros, so that AdamW decayed them and Muon's momentum moved."""
    assert run_ranks(world_size, _train, how, {}, 1) == [ABSENT] * world_size


def test_chunks_of_parameters_as_ddp() -> None:
    assert run_ranks(3, _train, "no_sync", {"shard_layout": "per_param"}, 1) == [ABSENT] * 3


@pytest.mark.parametrize("how", ["no_sync", "each", "partial"])
@pytest.mark.parametrize("outer", ["replicate", "broadcast", "shard"])
def test_replicas_as_ddp(outer: str, how: str) -> None:
    answers = run_ranks(4, _train, how, {"outer": outer}, 2)
    assert answers == [ABSENT if outer == "replicate" else []] * 4


def _as_fully_shard(launch: Launch) -> list[int]:
    joined(launch)
    mesh = init_device_mesh("cpu", (launch.world_size,))
    model, reference = _sharded(mesh), _model()
    for layer in reference.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(reference, mesh=mesh)
    absent = []
    for step, micros in enumerate(STEPS):
        for each in (model, reference):
            each.zero_grad()
            for micro, uses in enumerate(micros):
                alike = tuple(_NONE if use is _NONE else _ALL for use in uses)
                _backward(each, step, micro, alike, launch)  # its ranks must use the same parameters
        absent.append(_compare(model, reference, mesh.get_group(), step, 1e-5))
    return absent


def test_as_fully_shard_where_all_ranks_use_the_same() -> None:
    assert run_ranks(2, _as_fully_shard) == [ABSENT] * 2


def _of_low_precision(launch: Launch, dtypes: list[torch.dtype]) -> list[int]:
    """Which parameters have gradients does not depend on types, also where values are rounded to zeros of any sign."""
    joined(launch)
    mesh = init_device_mesh("cpu", (launch.world_size,))
    param_dtype, reduce_dtype = dtypes
    model = _sharded(mesh, mp_policy=MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype))
    absent = []
    for micros in STEPS:
        model.zero_grad()
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(launch.rank))
        for micro in micros:
            takes, runs = (use(launch.rank, launch.world_size) for use in micro)
            (-1e-7 * model(x, takes, runs).square().mean()).backward()  # in float16 little but zeros is left
        absent.append(sum(grad is None for grad in _whole_grads(model, mesh.get_group()).values()))
    return absent


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float16),
    ],
)
def test_the_sign_of_zero_survives_every_type(dtypes: tuple[torch.dtype, ...]) -> None:
    assert run_ranks(3, _of_low_precision, dtypes) == [ABSENT] * 3


class _Zero(torch.autograd.Function):
    """Multiplies by minus zero on the way back: every gradient behind is minus zero, and is one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.full_like(grad, -0.0)


def _of_minus_zeros(launch: Launch) -> tuple[int, bool]:
    joined(launch)
    mesh = init_device_mesh("cpu", (launch.world_size,))
    model = _sharded(mesh)
    _Zero.apply(model(torch.ones(2, WIDTH), launch.rank == 0, False)).sum().backward()
    grads = _whole_grads(model, mesh.get_group())
    return sum(g is None for g in grads.values()), all(not g.any() for g in grads.values() if g is not None)


def test_gradients_of_zeros_are_gradients() -> None:
    """Whichever sign the zeros have that autograd computed: one rank used the branch, so that all of them have it."""
    assert run_ranks(3, _of_minus_zeros) == [(ABSENT[1], True)] * 3


def _cost(launch: Launch) -> tuple[bool, list[int]]:
    joined(launch)
    wire = CountingWire(C10dWire())
    model = _sharded(init_device_mesh("cpu", (launch.world_size,)), wire=wire)
    asked: list[int] = []
    real = outer_module.are_unused
    outer_module.are_unused = lambda sums: (asked.append(len(sums)), real(sums))[1]
    traffic = []
    for takes in (True, True, False, launch.rank == 0):
        wire.reset()
        asked.append(0)
        model.zero_grad()
        model(torch.ones(2, WIDTH), takes, True).sum().backward()
        traffic.append(wire.counts())
    return all(counts == traffic[1] for counts in traffic[1:]), asked


def test_it_costs_no_message_and_ranks_that_used_a_parameter_do_not_look() -> None:
    """A layer and a weight of the root are never used, all else is in the first steps: only these are asked about."""
    for rank, (is_alike, asked) in enumerate(run_ranks(2, _cost)):
        assert is_alike
        steps = " ".join(map(str, asked)).split("0")
        first, second, nobody, one = ([int(count) for count in step.split()] for step in steps[1:])
        assert sum(first) == sum(second) == ABSENT[3]
        assert sum(nobody) == ABSENT[3] + 4
        assert sum(one) == ABSENT[3] + (4 if rank == 1 else 0)


def _muon(launch: Launch, outer: str, missing: str) -> list[str]:
    """Three steps of Muon: the branch on no rank, on the last one, on none again."""
    joined(launch)
    replicas = 2 if launch.world_size == 4 else 1
    shards = launch.world_size // replicas
    mesh = init_device_mesh("cpu", (replicas, shards) if replicas > 1 else (shards,))
    model = _sharded(mesh, outer=outer)
    reference = _model()
    alone = build_optimizer(reference, lr=0.1)
    optimizer = build_optimizer(model, lr=0.1, missing_grad=missing)
    x = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)
    told = []
    for uses in (_NONE, _LAST, _NONE):
        optimizer.zero_grad()
        alone.zero_grad()
        model(x, uses(launch.rank, launch.world_size), False).square().mean().backward()
        for rank in range(launch.world_size):
            (reference(x, uses(rank, launch.world_size), False).square().mean() / launch.world_size).backward()
        try:
            optimizer.step()
        except GradientError as error:
            told.append(str(error).splitlines()[0])
        alone.step()
    if not told:
        weights = full_state_dict(model)
        for name, parameter in reference.named_parameters():
            assert torch.allclose(weights[name], parameter, rtol=1e-4, atol=1e-5), name
    return told


@pytest.mark.parametrize(("world_size", "outer"), [(1, "replicate"), (3, "replicate"), (4, "replicate"), (4, "shard")])
def test_muon_leaves_alone_what_no_rank_used(world_size: int, outer: str) -> None:
    """Among it shards of which a rank holds nothing: it does not know who used them."""
    assert run_ranks(world_size, _muon, outer, "leave") == [[]] * world_size


@pytest.mark.parametrize(("world_size", "outer"), [(3, "replicate"), (4, "shard")])
def test_muon_refuses_on_all_ranks_what_no_rank_used(world_size: int, outer: str) -> None:
    """Only ranks that hold, or own, such a parameter knew that it is missing, and the others went on without them."""
    answers = run_ranks(world_size, _muon, outer, "error")
    assert answers == [answers[0]] * world_size
    assert len(answers[0]) == 3
    assert all(text.endswith("no gradient (optimizer.missing_grad=error)") for text in answers[0]), answers[0]
