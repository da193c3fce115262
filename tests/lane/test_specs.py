"""Specs of real models: names, shapes, views and splits, and the same list from options alone."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from dist_pool import run_ranks

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.trainer import Model, Topology
from hp_muon_plugin.layout.spec import Role
from hp_muon_plugin.megatron.versions import core_version
from hp_muon_plugin.models.gpt_specs import gpt_specs, padded_vocab_size, stage_specs
from hp_muon_plugin.muon.matrix_view import part_tensor
from hp_muon_plugin.muon.routing import Algorithm, default_route
from hp_muon_plugin.train.setup import Launch
from lane.harness import VOCAB, build, dense, mla, moe, specs_of, start, train_config


def moe_after_dense() -> Model:
    model = moe()
    assert model.moe is not None
    return replace(model, moe=replace(model.moe, first_dense_layers=1))


CASES = [
    ("dense", dense(), 1, Topology()),
    ("dense-tp2-pp2", dense(), 4, Topology(tp=2, pp=2)),
    ("moe-ep2", moe(), 2, Topology(ep=2)),
    ("moe-tp2-ep2", moe(), 4, Topology(tp=2, ep=2, sequence_parallel=True)),
    ("moe-etp2", moe(), 2, Topology(tp=2, etp=2, sequence_parallel=True)),
    ("moe-pp2-ep2", moe(), 4, Topology(pp=2, ep=2)),
    ("moe-after-dense", moe_after_dense(), 2, Topology(pp=2, ep=1)),
    ("mla", mla(), 1, Topology()),
    ("mla-wide", mla(v_head_dim=12), 1, Topology()),
    ("mla-tp2-etp2", mla(), 2, Topology(tp=2, etp=2, sequence_parallel=True)),
    ("tied", dense(tie_embeddings=True), 1, Topology()),
]


def _specs(launch: Launch, model: Model, topology: Topology, options: HpMuon) -> Any:
    from megatron.core import parallel_state

    from hp_muon_plugin.config.choices import Precision
    from hp_muon_plugin.megatron.groups import megatron_groups
    from hp_muon_plugin.megatron.specs import chunk_specs
    from hp_muon_plugin.models.gpt import gpt_model, transformer_config

    config = train_config(model, topology, optimizer=options)
    start(launch, config)
    core = transformer_config(model, topology, Precision.fp32)
    module = gpt_model(core, model, padded_vocab_size(VOCAB, model, topology))
    stage = parallel_state.get_pipeline_model_parallel_rank()
    expert = parallel_state.get_expert_model_parallel_rank()
    return stage, expert, list(chunk_specs([module], options, megatron_groups()).values())


@pytest.mark.parametrize(("name", "model", "ranks", "topology"), CASES, ids=[case[0] for case in CASES])
@pytest.mark.parametrize("options", [HpMuon(), HpMuon(per_head=True)], ids=["default", "per_head"])
def test_options_alone_predict_what_megatron_builds(
    name: str, model: Model, ranks: int, topology: Topology, options: HpMuon
) -> None:
    predicted = gpt_specs(model, topology, padded_vocab_size(VOCAB, model, topology), options)
    for stage, expert, built in run_ranks(ranks, _specs, model, topology, options):
        wanted = stage_specs(predicted, model, topology, stage=stage, ep=expert)
        assert {spec.name: spec for spec in built} == {spec.name: spec for spec in wanted}


def _grouped(launch: Launch, experts: int, hidden: int, ffn: int) -> Any:
    """megatron-core's own legacy grouped layer, its parameters as views and as its forward reads them."""
    from megatron.core.transformer.moe import experts as module

    from hp_muon_plugin.config.choices import Precision
    from hp_muon_plugin.megatron.groups import megatron_groups
    from hp_muon_plugin.megatron.specs import chunk_specs
    from hp_muon_plugin.models.gpt import transformer_config

    config = train_config(moe(), Topology(ep=launch.world_size))
    start(launch, config)
    core = transformer_config(config.model, config.topology, Precision.fp32)
    module.gg = object()  # the kernels are only needed to run it
    layer = module.GroupedMLP.__new__(module.GroupedMLP)
    torch.nn.Module.__init__(layer)
    layer.config, layer.num_local_experts = core, experts
    layer.weight1 = torch.nn.Parameter(torch.arange(experts * hidden * 2 * ffn).float().view(hidden, -1))
    layer.weight2 = torch.nn.Parameter(torch.arange(experts * ffn * hidden).float().view(-1, hidden))
    holder = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": layer})})
    specs = chunk_specs([holder], HpMuon(), megatron_groups())
    first = layer.weight1.view(experts, hidden, -1)
    second = layer.weight2.view(experts, -1, hidden)
    found = {}
    for param, spec in specs.items():
        assert spec.view is not None
        (part,) = spec.view.parts
        matrices = part_tensor(param.detach(), spec.view, part).reshape(spec.view.part_shape(part))
        found[spec.role] = (spec.name, matrices)
    return found, first.detach(), second.detach()


@pytest.mark.skipif("core_version().lane >= (0, 17)", reason="megatron-core removed GroupedMLP in 0.17")
def test_legacy_grouped_experts_read_as_their_forward_reads_them() -> None:
    experts, hidden, ffn = 2, 32, 24
    for rank, (found, first, second) in enumerate(run_ranks(2, _grouped, experts, hidden, ffn)):
        name, matrices = found[Role.expert_first]
        assert name == f"mlp.experts.{2 * rank}-{2 * rank + 1}.weight1"
        wanted = [half for expert in first for half in expert.split(ffn, dim=1)]
        assert torch.equal(matrices, torch.stack(wanted))
        assert torch.equal(found[Role.expert_second][1], second)


def _routes(launch: Launch, model: Model) -> dict[str, Algorithm]:
    ready = build(launch, train_config(model))
    return {spec.name: default_route(spec)[0] for spec in specs_of(ready).values()}


def test_embeddings_output_router_norms_never_go_to_muon_by_default() -> None:
    routes = run_ranks(1, _routes, mla())[0]
    adamw = {name for name, algorithm in routes.items() if algorithm is Algorithm.adamw}
    assert all(any(word in name for word in ("embeddings", "output_layer", "router", "norm")) for name in adamw), adamw
    assert sum("router" in name for name in adamw) == 2
    assert len(routes) - len(adamw) == 2 * (5 + 2 * 4 + 2)


def _tied(launch: Launch) -> Any:
    ready = build(launch, train_config(dense(tie_embeddings=True), Topology(pp=launch.world_size)))
    return [(spec.name, spec.role, default_route(spec)[0]) for spec in specs_of(ready).values() if spec.shape[0] == 128]


def test_the_copy_of_a_tied_embedding_on_the_last_stage_stays_with_adamw() -> None:
    """Megatron #4641: it was routed to Muon there, and the two copies drifted apart."""
    for found in run_ranks(2, _tied):
        assert [algorithm for *_, algorithm in found] == [Algorithm.adamw]


def test_more_tensor_parallel_ranks_than_query_groups() -> None:
    """Megatron PR 6326: 4 heads, 1 key-value group, 2 ranks: a rank's rows begin inside a group."""
    if core_version().lane < (0, 16):
        pytest.skip("megatron-core 0.12 cannot split a query group: 'num_query_groups' must be divisible by tp")
    predicted = run_ranks(2, _one_group_step)
    alone = run_ranks(1, _one_group_step)[0]
    for weights in predicted:
        for name, wanted in alone.items():
            torch.testing.assert_close(weights[name], wanted, rtol=2e-5, atol=2e-6)


def _one_group_step(launch: Launch) -> Any:
    from lane.harness import train, whole_weights

    model = dense(num_query_groups=1)
    ready = build(launch, train_config(model, Topology(tp=launch.world_size)))
    return whole_weights(train(ready, 5))


def _one_weight_per_expert(launch: Launch) -> Any:
    """Transformer Engine's grouped layer holds ``weight0``, ``weight1``, ...; only running it needs kernels."""
    from megatron.core.transformer.moe import experts as module

    from hp_muon_plugin.config.choices import Precision
    from hp_muon_plugin.megatron.groups import megatron_groups
    from hp_muon_plugin.megatron.specs import chunk_specs
    from hp_muon_plugin.models.gpt import transformer_config

    config = train_config(moe(), Topology(ep=launch.world_size))
    start(launch, config)
    layer = module.TEGroupedMLP.__new__(module.TEGroupedMLP)
    torch.nn.Module.__init__(layer)
    layer.config, layer.num_local_experts = transformer_config(config.model, config.topology, Precision.fp32), 2
    for name, shape in (("linear_fc1", (48, 32)), ("linear_fc2", (32, 24))):
        linear = torch.nn.Module()
        for expert in range(2):
            param = torch.nn.Parameter(torch.randn(shape))
            param.allreduce = False  # as Transformer Engine marks experts
            setattr(linear, f"weight{expert}", param)
        setattr(layer, name, linear)
    holder = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": layer})})
    found = {}
    for param, spec in chunk_specs([holder], HpMuon(), megatron_groups()).items():
        assert spec.view is not None
        parts = [part_tensor(param.detach(), spec.view, part).reshape(-1, param.shape[1]) for part in spec.view.parts]
        whole = torch.cat(parts)
        matrices = sum(spec.view.part_shape(part)[0] for part in spec.view.parts)
        found[spec.name] = (spec.role, default_route(spec)[0], matrices, torch.equal(whole, param.detach()))
    return found


def test_grouped_experts_with_a_weight_each_are_named_by_their_place_in_the_model() -> None:
    """The only grouped form from megatron-core 0.17 on."""
    for rank, found in enumerate(run_ranks(2, _one_weight_per_expert)):
        assert found == {
            f"mlp.experts.linear_fc{layer}.weight{2 * rank + expert}": (role, Algorithm.muon, matrices, True)
            for layer, role, matrices in ((1, Role.expert_first, 2), (2, Role.expert_second, 1))
            for expert in range(2)
        }
