"""What users do to a sharded model between steps: all of it counts, or is refused. Silence was wrong training."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.fsdp import MixedPrecision, hp_fully_shard
from hp_muon_plugin.fsdp.whole import full_state_dict
from hp_muon_plugin.muon import build_adamw, build_optimizer
from hp_muon_plugin.train.setup import Launch
from tests.dist_pool import joined, run_ranks
from tests.fsdp.small_models import WIDTH, Block, Language, loss, tokens

Pair = tuple[nn.Module, nn.Module]
Change = Callable[[nn.Module, int], Any]


def _models(
    launch: Launch, prepare: Callable[[nn.Module], Any] | None = None, *, outer: str = "", **options: Any
) -> Pair:
    """A sharded model, and the same in one process."""
    torch.manual_seed(1)
    whole = Language([Block(WIDTH) for _ in range(2)], is_tied=False)
    model = copy.deepcopy(whole)
    if prepare is not None:
        prepare(model)
    replicas = (2,) if outer else ()
    mesh = init_device_mesh("cpu", (*replicas, launch.world_size // 2 if outer else launch.world_size))
    for layer in model.layers:
        hp_fully_shard(layer, mesh, **options)
    return hp_fully_shard(model, mesh, **({"outer": outer} if outer else {}), **options), whole


def _backward(pair: Pair, launch: Launch, index: int, run: Callable[..., Any] | None = None) -> None:
    model, whole = pair
    loss(model if run is None else run, tokens(index, 0, launch.rank)).backward()
    (sum(loss(whole, tokens(index, 0, rank)) for rank in range(launch.world_size)) / launch.world_size).backward()


def _difference(pair: Pair) -> float:
    weights = {name.replace("_orig_mod.", ""): value for name, value in full_state_dict(pair[0]).items()}
    return max(float((weights[name] - value).abs().max()) for name, value in pair[1].state_dict().items())


def _trained(launch: Launch, change: Change, options: dict[str, Any], clears: bool) -> float:
    """Three steps; ``change(model, step)`` comes before each backward pass and gives the parameters of the step."""
    joined(launch)
    pair = _models(launch, **options)
    for index in range(3):
        chosen = [change(model, index) for model in pair]
        optimizers = [torch.optim.SGD(params, lr=0.5) for params in chosen]
        _backward(pair, launch, index)
        for optimizer in optimizers:
            optimizer.step()
            if clears:
                optimizer.zero_grad()
    return _difference(pair)


def _vectors(model: nn.Module, index: int) -> list[nn.Parameter]:
    """An optimizer over a part of each bucket: gradients of the others are never cleared."""
    return [p for name, p in model.named_parameters() if name.endswith("bias")]


def _in_turn(model: nn.Module, index: int) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if name.endswith("bias") == bool(index % 2)]


def _scaled_gradients(model: nn.Module, index: int) -> list[nn.Parameter]:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 2
    return list(model.parameters())


def _frozen_now_and_then(model: nn.Module, index: int) -> list[nn.Parameter]:
    model.head.weight.requires_grad_(index != 1)
    model.layers[0].first.weight.requires_grad_(index == 1)
    return list(model.parameters())


def _moved(model: nn.Module, index: int) -> list[nn.Parameter]:
    model.double().float()  # with the gradients of the step before
    return list(model.parameters())


def _assigned(model: nn.Module, index: int) -> list[nn.Parameter]:
    model.head.weight.data = model.head.weight.data * 0.5
    return list(model.parameters())


@pytest.mark.parametrize(
    ("change", "clears"),
    [
        (_vectors, True),
        (_in_turn, True),
        (_frozen_now_and_then, True),
        (_moved, True),
        (_assigned, True),
        (_moved, False),
        (_scaled_gradients, False),
    ],
)
def test_as_in_one_process(change: Change, clears: bool) -> None:
    """Gradients that an optimizer had cleared were added again while others of the bucket were not cleared."""
    for difference in run_ranks(2, _trained, change, {}, clears):
        assert difference < 1e-6


@pytest.mark.parametrize("change", [_in_turn, _assigned])
def test_as_in_one_process_where_replicas_own_parameters(change: Change) -> None:
    """Weights that were assigned before the first step were lost when buffers for replicas took their place."""
    for difference in run_ranks(4, _trained, change, {"outer": "shard"}, True):
        assert difference < 1e-6


def test_gradients_of_another_type_than_the_weights() -> None:
    """What is reduced is then not what the shards are given."""
    for change in (_in_turn, _scaled_gradients):
        for difference in run_ranks(2, _trained, change, {"mp_policy": MixedPrecision(None, torch.float64)}, True):
            assert difference < 1e-6


def _refusals(launch: Launch) -> list[str]:
    joined(launch)
    said = []

    def refused(change: Callable[[nn.Module], Any]) -> None:
        model, _ = _models(launch, lambda model: model.embedding.requires_grad_(False))
        try:
            change(model)
            model(tokens(0, 0, 0))
        except ConfigError as error:
            said.append(str(error))

    def set_head(model: nn.Module, weight: nn.Parameter) -> None:
        model.head.weight = weight

    refused(lambda model: model.to(torch.bfloat16))
    refused(lambda model: set_head(model, nn.Parameter(torch.zeros(3, 3))))
    refused(lambda model: set_head(model, model.embedding.weight))
    refused(lambda model: model.layers[0].register_parameter("more", nn.Parameter(torch.ones(2))))
    refused(lambda model: model.embedding.requires_grad_(True))
    refused(lambda model: hp_fully_shard(model.head, init_device_mesh("cpu", (launch.world_size,))))
    with pytest.raises(TypeError, match="can't be copied"):
        copy.deepcopy(_models(launch)[0])
    for build in (torch.optim.AdamW, build_optimizer, build_adamw):
        made: list[Any] = []

        def make(model: nn.Module, build: Any = build, made: list[Any] = made) -> None:
            made.append(build(model.parameters() if build is torch.optim.AdamW else model))

        late = _models(launch, make)
        _backward(late, launch, 0)
        with pytest.raises(ConfigError, match="was made before hp_fully_shard"):
            made[0].step()
        torch.optim.SGD(late[0].parameters(), lr=0.1).step()
    return said


def test_what_cannot_count_is_refused() -> None:
    """Each of these went on with the old weights, or trained nothing, and said so nowhere."""
    for said in run_ranks(2, _refusals):
        words = ["torch.bfloat16", "came after", "was replaced", "more", "requires a gradient now", "another unit"]
        for message, word in zip(said, words, strict=True):
            assert word in message
            assert "fix:" in message


def _clipped(launch: Launch) -> tuple[float, float, float]:
    joined(launch)
    pair = _models(launch)
    ours, whole = (build_adamw(model, lr=0.01, eps=1e-3, clip_grad=0.05) for model in pair)
    for index in range(3):
        _backward(pair, launch, index)
        for optimizer in (ours, whole):
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(ConfigError, match="shard of hp_fully_shard"):
        build_adamw(pair[0].named_parameters(), lr=0.01)
    assert ours.grad_norm_last is not None
    assert whole.grad_norm_last is not None
    return float(ours.grad_norm_last), float(whole.grad_norm_last), _difference(pair)


def test_the_baseline_clips_shards_by_the_norm_of_all_ranks() -> None:
    """``optimizer=adamw`` took the norm of this rank's shards, another one on every rank."""
    for ours, whole, difference in run_ranks(2, _clipped):
        assert ours == pytest.approx(whole, rel=1e-5)
        assert difference < 1e-6


def _compiled(launch: Launch, place: str) -> float:
    joined(launch)

    def compile_layers(model: nn.Module) -> None:
        model.layers = nn.ModuleList(torch.compile(layer, backend="aot_eager") for layer in model.layers)

    pair = _models(launch, compile_layers if place == "layers before" else None)
    if place == "layers after":
        for layer in pair[0].layers:
            layer.compile(backend="aot_eager")
    run = torch.compile(pair[0], backend="aot_eager") if place == "model after" else None
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in pair]
    for index in range(3):
        _backward(pair, launch, index, run)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return _difference(pair)


@pytest.mark.parametrize("place", ["layers before", "layers after", "model after"])
def test_compiled_models_train_alike(place: str) -> None:
    """A wrapper of torch.compile shows its module's attributes, so each unit counted twice and trained wrongly."""
    for difference in run_ranks(2, _compiled, place):
        assert difference < 1e-6
