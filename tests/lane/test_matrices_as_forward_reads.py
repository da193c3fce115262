"""The matrices that Muon takes from fused weights are those that megatron-core's forward multiplies with.

The oracle of the other tests slices by :mod:`lane.matrices`; here its slices are compared with real forward passes, and
the package's own views with its slices.
"""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dist_pool import run_ranks

from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.muon.matrix_view import part_tensor
from hp_muon_plugin.muon.routing import Algorithm, default_route
from hp_muon_plugin.train.setup import Launch
from lane.harness import SEQ, batches, build, dense, mla, moe, specs_of, train_config
from lane.matrices import matrices_of

MODELS = {"dense": dense, "moe": moe, "mla": mla, "mla_wide": lambda: mla(v_head_dim=12)}


def _by_view(spec: ParamSpec) -> list[list[int]]:
    """Elements of each matrix, in the order in which the view has them."""
    assert spec.view is not None
    places = torch.arange(math.prod(spec.shape)).view(spec.shape)
    found = []
    for part in spec.view.parts:
        count, rows, cols = spec.view.part_shape(part)
        found += part_tensor(places, spec.view, part).reshape(count, rows * cols).tolist()
    return found


def _compared(launch: Launch, name: str) -> list[str]:
    model = MODELS[name]()
    ready = build(launch, train_config(model))
    seen = []
    for param, spec in specs_of(ready).items():
        matrices = matrices_of(spec.name, param.shape[0], model)
        assert (matrices is None) == (default_route(spec)[0] is Algorithm.adamw), spec.name
        if matrices is not None:
            places = torch.arange(param.numel()).view(param.shape)
            assert _by_view(spec) == [places[rows].flatten().tolist() for rows in matrices], spec.name
            assert sum(len(rows) for rows in matrices) == param.shape[0]
            seen.append(spec.name)
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_views_and_routes_are_those_of_the_oracle(name: str) -> None:
    seen = run_ranks(1, _compared, name)[0]
    assert any("linear_fc1" in weight for weight in seen)
    assert any(("linear_kv_up_proj" if "mla" in name else "linear_qkv") in weight for weight in seen)


def _parts(layer: Any, path: str, model: Any) -> list[torch.Tensor]:
    weight = layer.get_parameter(f"{path}.weight").detach()
    rows = matrices_of(f"decoder.layers.0.{path}.weight", weight.shape[0], model)
    assert rows is not None
    return [weight[part] for part in rows]


def _dense(launch: Launch) -> None:
    model = dense()
    ready = build(launch, train_config(model))
    layer = ready.model.module.decoder.layers[0]
    x = torch.randn(5, 1, model.hidden_size, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        read = layer.self_attention.get_query_key_value_tensors(x)[:3]
        for part, got in zip(_parts(layer, "self_attention.linear_qkv", model), read, strict=True):
            torch.testing.assert_close(x.flatten(0, 1) @ part.T, got.reshape(5, -1))
        gate, up = _parts(layer, "mlp.linear_fc1", model)
        wanted, _ = layer.mlp.linear_fc2(F.silu(x @ gate.T) * (x @ up.T))
        torch.testing.assert_close(layer.mlp(x)[0], wanted)
        swapped, _ = layer.mlp.linear_fc2(F.silu(x @ up.T) * (x @ gate.T))
        assert not torch.allclose(swapped, wanted)


def test_queries_keys_values_gate_and_up_are_what_forward_multiplies_with() -> None:
    run_ranks(1, _dense)


def _latent(launch: Launch, v_head_dim: int) -> None:
    model = mla(v_head_dim=v_head_dim)
    assert model.mla is not None
    ready = build(launch, train_config(model))
    layer = ready.model.module.decoder.layers[0]
    attention, seen = layer.self_attention, dict[str, torch.Tensor]()
    attention.linear_kv_down_proj.register_forward_hook(lambda _, given, __: seen.update(hidden=given[0]))
    attention.linear_kv_up_proj.register_forward_hook(lambda _, given, __: seen.update(latent=given[0]))
    attention.core_attention.register_forward_pre_hook(lambda _, given: seen.update(k=given[1], v=given[2]))
    mask = torch.triu(torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool), 1)
    batch = next(batches(ready.config, 0, 1))

    def run() -> dict[str, torch.Tensor]:
        with torch.no_grad():
            ready.model(batch.tokens, batch.position_ids, mask, labels=batch.labels)
        return {name: value.detach().reshape(SEQ, *value.shape[2:]).clone() for name, value in seen.items()}

    before = run()
    keys, values = _parts(layer, "self_attention.linear_kv_up_proj", model)
    unrotated = before["k"][..., : model.mla.qk_head_dim].reshape(SEQ, -1)
    torch.testing.assert_close(before["latent"].reshape(SEQ, -1) @ keys.T, unrotated)
    torch.testing.assert_close(before["latent"].reshape(SEQ, -1) @ values.T, before["v"].reshape(SEQ, -1))
    weight = attention.linear_kv_down_proj.weight
    rows = matrices_of("self_attention.linear_kv_down_proj.weight", weight.shape[0], model)
    assert rows is not None
    with torch.no_grad():
        weight[rows[1]] += 1.0
    after = run()
    torch.testing.assert_close(after["latent"], before["latent"], rtol=0, atol=0)  # not of the second matrix
    assert not torch.allclose(after["k"][..., model.mla.qk_head_dim :], before["k"][..., model.mla.qk_head_dim :])
    torch.testing.assert_close(after["v"], before["v"], rtol=0, atol=0)


@pytest.mark.parametrize("v_head_dim", [8, 12])
def test_matrices_of_latent_attention_are_what_forward_multiplies_with(v_head_dim: int) -> None:
    run_ranks(1, _latent, v_head_dim)
