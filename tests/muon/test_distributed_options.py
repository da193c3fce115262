"""Options, types and odd models over shards: each gives what one process gives with the same options."""

import math
from typing import Any

import pytest
import torch
from dist_pool import joined, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.muon import build_optimizer
from hp_muon_plugin.muon.distributed.plan import Route
from hp_muon_plugin.train.setup import Launch
from muon.sharded_weights import Shapes, Weights, assert_close, built, filled, model_of_weights, sharded, trained

SHAPES: Shapes = {"wide": (24, 80), "tall": (72, 20), "square": (32, 32), "thin": (33, 2), "experts": (3, 8, 20)}
STRATEGIES = ("allgather", "allgather_dedup", "alltoall", "gram")
OPTIONS: dict[str, tuple[dict[str, Any], float]] = {  # options, tolerance as a part of the change
    "no look-ahead": ({"nesterov": False, "weight_decay": 0.0}, 5e-5),
    "ten steps": ({"schedule": "deepseek_v4"}, 5e-5),
    "polar express": ({"schedule": "polar_express"}, 5e-5),
    "bfloat16 momentum": ({"momentum_dtype": "bfloat16"}, 5e-5),
    "bfloat16 messages": ({"comm_dtype": "bfloat16"}, 1e-2),
    "bfloat16 iteration": ({"ns_dtype": "bfloat16"}, 2e-2),
    "clipped": ({"clip_grad": 0.01}, 5e-5),
}
SCALES = (1e25, 1e-30, 0.0)


def _run_options(launch: Launch, layout: str) -> bool:
    gradients = [filled(1, SHAPES), filled(2, SHAPES)]
    expected = {}
    for what, (options, _) in OPTIONS.items():
        options = {name: value for name, value in options.items() if name != "comm_dtype"}
        reference = model_of_weights(SHAPES)
        expected[what] = trained(reference, build_optimizer(reference, **options), gradients)
    joined(launch)
    mesh = init_device_mesh("cpu", (launch.world_size,))
    for strategy in STRATEGIES:
        for what, (options, tolerance) in OPTIONS.items():
            model = sharded(SHAPES, layout, mesh)
            optimizer = build_optimizer(model, strategy=strategy, **options)
            found = trained(model, optimizer, gradients)
            assert_close(found, expected[what], (what, strategy), of_change=tolerance)
            if what == "ten steps" and strategy == "gram":
                routes = {batch.route for plan in optimizer.share_plans for batch in plan.batches}
                assert Route.GRAM in routes or layout == "flat"
        _check_scales(mesh, layout, strategy)
    return True


def _check_scales(mesh: Any, layout: str, strategy: str) -> None:
    """The size of gradients does not matter; with gradients of zero weights only decay."""
    unit = filled(1, SHAPES)
    for scale in SCALES:
        reference, model = model_of_weights(SHAPES), sharded(SHAPES, layout, mesh)
        scaled = [{name: scale * value for name, value in unit.items()}]
        expected = trained(reference, build_optimizer(reference, clip_grad=0.0), [unit])
        if scale == 0.0:
            expected = {name: value * (1 - 5e-3 * 0.1) for name, value in model_of_weights(SHAPES).named_parameters()}
        found = trained(model, build_optimizer(model, strategy=strategy, clip_grad=0.0), scaled)
        assert_close(found, expected, (scale, strategy))


@pytest.mark.parametrize(("ranks", "layout"), [(2, "per_param"), (3, "flat"), (2, "fully_shard")])
def test_options_and_sizes_of_gradients(ranks: int, layout: str) -> None:
    assert run_ranks(ranks, _run_options, layout) == [True] * ranks


def _tied() -> Weights:
    model = model_of_weights(SHAPES)
    model.layers["square"].again = model.layers["square"].weight
    return model


def _frozen() -> Weights:
    model = model_of_weights(SHAPES)
    model.layers["tall"].weight.requires_grad_(False)
    return model


MODELS: dict[str, Any] = {
    "one parameter": lambda: model_of_weights({"only": (16, 40)}),
    "one huge matrix": lambda: model_of_weights({"huge": (192, 256), "tiny": (2, 2)}),
    "a row for few": lambda: model_of_weights({"row": (1, 64), "rows": (2, 16)}),
    "nothing is cut": lambda: model_of_weights({"a": (4, 8, 8), "b": (8, 4, 12)}),
    "tied": _tied,
    "frozen": _frozen,
}


def _shapes(model: nn.Module) -> Shapes:
    return {name.split(".")[1]: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}


def _run_models(launch: Launch, layout: str, dtype: torch.dtype) -> bool:
    joined(launch)
    mesh = init_device_mesh("cpu", (launch.world_size,))
    for what, make in MODELS.items():
        gradients = [filled(seed, _shapes(make())) for seed in (1, 2)]
        for gradient in gradients if what == "frozen" else ():
            del gradient["layers.tall.weight"]
        reference = make().to(dtype)
        expected = trained(reference, build_optimizer(reference), gradients)
        for strategy in STRATEGIES:
            model = sharded(make().to(dtype), layout, mesh)
            optimizer = build_optimizer(model, strategy=strategy)
            found = trained(model, optimizer, gradients)
            for name, value in expected.items():
                if dtype is torch.bfloat16:  # sums may round to the neighbour
                    torch.testing.assert_close(found[name], value, rtol=2**-7, atol=2**-9)
                else:
                    torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
            if what == "nothing is cut" and launch.world_size == 4:
                assert not any(plan.batches for plan in optimizer.share_plans)
    return True


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("per_param", torch.float32), ("flat", torch.bfloat16), ("fully_shard", torch.bfloat16)],
)
def test_odd_models_and_bfloat16_weights(layout: str, dtype: torch.dtype) -> None:
    assert run_ranks(4, _run_models, layout, dtype) == [True] * 4


def _run_groups(launch: Launch) -> bool:
    """Own rates and decays for some weights, changed between steps as schedulers do; float32 gradients for bfloat16."""

    def train(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
        muon = next(group for group in optimizer.param_groups if group["algorithm"] == "muon")
        names = {param: spec.name for param, spec in optimizer.specs.items()}
        own = [param for param in muon["params"] if names[param] in ("layers.wide.weight", "layers.experts.weight")]
        muon["params"] = [param for param in muon["params"] if param not in set(own)]
        optimizer.add_param_group({**muon, "params": own, "lr": 0.03, "weight_decay": 0.5, "momentum": 0.5})
        trained(model, optimizer, [filled(1, SHAPES)])
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        return trained(model, optimizer, [filled(2, SHAPES)])

    reference = model_of_weights(SHAPES)
    expected = train(reference, build_optimizer(reference))
    joined(launch)
    mesh = init_device_mesh("cpu", (launch.world_size,))
    for strategy in STRATEGIES:
        model = sharded(SHAPES, "per_param", mesh)
        assert_close(train(model, built(model, strategy=strategy)), expected, strategy)
    return True


def test_groups_with_their_own_rates() -> None:
    assert run_ranks(2, _run_groups) == [True] * 2


def _run_wide_gradients(launch: Launch, layout: str) -> bool:
    """Weights in bfloat16 with gradients in float32, as trainers that accumulate in float32 have them."""

    def bfloat16(model: Weights) -> Weights:
        for param in model.to(torch.bfloat16).parameters():
            param.grad_dtype = torch.float32
        return model

    gradients = [filled(1, SHAPES), filled(2, SHAPES)]
    reference = bfloat16(model_of_weights(SHAPES))
    expected = trained(reference, build_optimizer(reference), gradients)
    joined(launch)
    mesh = init_device_mesh("cpu", (launch.world_size,))
    for strategy in STRATEGIES:
        model = sharded(model_of_weights(SHAPES).to(torch.bfloat16), layout, mesh)
        for param in model.parameters():
            param.grad_dtype = torch.float32
        found = trained(model, build_optimizer(model, strategy=strategy), gradients)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=2**-7, atol=2**-9)
    return True


@pytest.mark.parametrize("layout", ["per_param", "fully_shard"])
def test_float32_gradients_of_bfloat16_weights(layout: str) -> None:
    assert run_ranks(2, _run_wide_gradients, layout) == [True] * 2


@pytest.mark.parametrize("option", ["comm_dtype", "momentum_dtype"])
def test_float16_messages_and_momenta_are_refused(option: str) -> None:
    """Momenta of usual gradients vanish in float16: 1e-8 is 0 there."""
    assert torch.tensor(1e-8).half() == 0
    assert math.isinf(float(torch.tensor(1e5).half()))
    with pytest.raises(ConfigError, match=rf"optimizer.{option}=float16: .* vanish .*\n  fix: .*bfloat16"):
        build_optimizer(model_of_weights(SHAPES), **{option: "float16"})
