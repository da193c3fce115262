import pytest
import torch
from omegaconf import OmegaConf

from hp_muon_plugin.errors import ConfigError, ConfigErrors
from hp_muon_plugin.layout.spec import ParamSpec, Role, plain_matrix
from hp_muon_plugin.muon import build_adamw, build_optimizer, routing_table
from hp_muon_plugin.muon.names import module_specs, named_specs
from hp_muon_plugin.muon.routing import Algorithm, default_route, route_parameters


def route_of(name: str, shape: tuple[int, ...]) -> Algorithm:
    spec = next(iter(named_specs([(name, torch.nn.Parameter(torch.zeros(shape)))]).values()))
    return default_route(spec)[0]


@pytest.mark.parametrize(
    "name",
    [
        "tok_embeddings.weight",
        "model.embed_tokens.weight",
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "output.weight",
        "lm_head.weight",
        "model.lm_head.weight",
        "tok.weight",
        "tok",
        "model.emb.weight",
        "token_emb.weight",
        "pos",
        "register_tokens",
        "shared.weight",
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "head.weight",
        "heads.head.weight",
        "value_head.weight",
        "to_logits.1.weight",
        "cls.predictions.decoder.weight",
        "vocab_projector.weight",
        "proj_out.weight",
        "layers.0.moe.router.weight",
        "layers.0.mlp.gate.weight",
    ],
)
def test_embeddings_output_and_router_go_to_adamw(name: str) -> None:
    """DeepSpeed PR 7641: an ndim==2 rule sent embeddings and lm_head to Muon."""
    assert route_of(name, (64, 16)) is Algorithm.adamw


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.wq.weight",
        "layers.0.mlp.gate_proj.weight",
        "blocks.1.fc.weight",
        "blocks.0.proj_out.weight",
        "blocks.0.token_mixer.weight",
        "layers.0.mlp.shared.weight",
        "layers.0.head_proj.weight",
        "layers.0.attention.output.dense.weight",
        "decoder.weight_proj.weight",
    ],
)
def test_hidden_matrices_go_to_muon(name: str) -> None:
    assert route_of(name, (64, 16)) is Algorithm.muon


def test_a_linear_layer_called_head_goes_to_adamw() -> None:
    """A plain model's output layer ``head`` and token table ``tok`` were hidden matrices."""
    model = torch.nn.ModuleDict({"tok": torch.nn.Linear(10, 4), "fc": torch.nn.Linear(4, 4)})
    model["head"] = torch.nn.Linear(4, 10)
    routes = {s.name: (s.role, default_route(s)[0]) for s in module_specs(model).values()}
    assert routes["tok.weight"] == (Role.embedding, Algorithm.adamw)
    assert routes["head.weight"] == (Role.output, Algorithm.adamw)
    assert routes["fc.weight"] == (Role.matrix, Algorithm.muon)


def test_embedding_module_with_an_odd_name_goes_to_adamw() -> None:
    model = torch.nn.ModuleDict({"lookup": torch.nn.Embedding(10, 4), "fc": torch.nn.Linear(4, 4)})
    routes = {s.name: default_route(s)[0] for s in module_specs(model).values()}
    assert routes["lookup.weight"] is Algorithm.adamw
    assert routes["fc.weight"] is Algorithm.muon


def test_depthwise_convolution_goes_to_adamw() -> None:
    """maxtext PR 4843: a (C, 1, k) kernel was orthogonalised."""
    assert route_of("mixer.conv1d.weight", (8, 1, 4)) is Algorithm.adamw
    model = torch.nn.Sequential(torch.nn.Conv1d(8, 8, 4, groups=8))
    assert [default_route(s)[0] for s in module_specs(model).values()] == [Algorithm.adamw] * 2


def test_stacked_experts_go_to_muon_as_matrices() -> None:
    spec = next(iter(named_specs([("experts.w1", torch.nn.Parameter(torch.zeros(4, 8, 16)))]).values()))
    assert default_route(spec)[0] is Algorithm.muon
    assert spec.view is not None
    assert spec.view.part_shape(spec.view.parts[0]) == (4, 8, 16)


def test_tied_output_is_one_parameter_and_stays_with_adamw() -> None:
    """Megatron #4641: the copy of a tied embedding was routed to Muon and drifted away."""

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(4, 10, bias=False)
            self.embed = torch.nn.Embedding(10, 4)
            self.project.weight = self.embed.weight
            self.fc = torch.nn.Linear(4, 4, bias=False)

    specs = module_specs(Tied())
    assert len(specs) == 2
    assert {s.name: default_route(s)[0] for s in specs.values()} == {
        "project.weight": Algorithm.adamw,
        "fc.weight": Algorithm.muon,
    }


def test_routing_goes_by_the_logical_shape() -> None:
    """DeepSpeed PR 8438: under zero.Init every placeholder has shape (0,), and Muon was silently off."""
    param = torch.nn.Parameter(torch.zeros(0))
    param.ds_shape = torch.Size((256, 256))  # type: ignore[attr-defined]
    spec = named_specs([("layers.0.fc.weight", param)])[param]
    assert default_route(spec)[0] is Algorithm.muon
    assert spec.shape == (256, 256)


def test_no_matrix_at_all_is_an_error() -> None:
    """LlamaFactory #8041: "0 Muon params" trained on without a word."""
    with pytest.raises(ConfigError, match="none of the 1 parameters is a matrix") as caught:
        build_optimizer([("flat", torch.nn.Parameter(torch.zeros(100)))])
    assert "fix:" in str(caught.value)


def test_flat_shard_asked_for_by_name_is_an_error_naming_it() -> None:
    """Moonlight #27: a flattened shard in Newton-Schulz gave -inf."""
    named = [
        ("fc.weight", torch.nn.Parameter(torch.zeros(4, 4))),
        ("flat.weight", torch.nn.Parameter(torch.zeros(100))),
    ]
    with pytest.raises(ConfigError, match=r"flat.weight has shape \[100\], which is no matrix"):
        build_optimizer(named, muon_params=["flat.*"])


def test_a_vector_stored_as_a_matrix_goes_to_adamw_unless_asked_for() -> None:
    spec = ParamSpec("gate_weight", Role.matrix, (1, 64), view=plain_matrix(1, 64))
    assert default_route(spec)[0] is Algorithm.adamw
    assert route_parameters([spec], muon_params=["gate*"])[0].algorithm is Algorithm.muon


def test_overlapping_and_unmatched_patterns_are_errors() -> None:
    specs = [ParamSpec(f"layers.{i}.fc", Role.matrix, (4, 4), view=plain_matrix(4, 4)) for i in range(2)]
    with pytest.raises(ConfigErrors) as caught:
        route_parameters(specs, muon_params=["layers.0.*", "nothing.*"], adamw_params=["layers.*"])
    assert "also fits layers.0.fc" in str(caught.value)
    assert "optimizer.muon_params=nothing.*: fits no parameter" in str(caught.value)


def test_frozen_parameters_are_in_no_group() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[0].weight.requires_grad_(False)
    optimizer = build_optimizer(model)
    assert model[0].weight not in {p for g in optimizer.param_groups for p in g["params"]}
    assert "frozen=1" in routing_table(optimizer)


def test_parameters_without_names_are_refused_with_the_fix() -> None:
    with pytest.raises(ConfigError, match=r"pass the model, or model.named_parameters\(\)"):
        build_optimizer(torch.nn.Linear(4, 4).parameters())  # type: ignore[arg-type]


def test_groups_of_ones_own_are_told_the_options_that_say_the_same() -> None:
    """The message asked for the model, and was silent about the rates and the decay that the groups were for."""
    groups = [{"params": list(torch.nn.Linear(4, 4).parameters()), "weight_decay": 0.0}]
    for given in (groups, OmegaConf.create({"params": groups}, flags={"allow_objects": True}).params):  # as Hydra does
        with pytest.raises(ConfigError, match=r"named_parameters\(\); .*optimizer\.adamw\.weight_decay"):
            build_optimizer(given)


def test_two_parameters_of_one_name_are_an_error_that_says_so() -> None:
    """Two models in one list: it was a bare AssertionError."""
    two = [*torch.nn.Linear(4, 4).named_parameters(), *torch.nn.Linear(4, 4).named_parameters()]
    with pytest.raises(ConfigErrors, match=r"(?s)params=weight: is the name of 2 parameters.*params=bias: is the name"):
        build_optimizer(two)


def test_the_baseline_has_a_table_too() -> None:
    """It was an AttributeError: the baseline's options have no muon_params."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8))
    model[0].bias.requires_grad_(False)
    text = routing_table(build_adamw(model))
    assert "optimizer=adamw" in text
    assert "muon=0 parameters" in text
    assert f"adamw=3 parameters, {(8 * 48 + 12) / 2**20:.3f} MiB of state; frozen=1" in text


def test_the_table_counts_and_explains() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    text = routing_table(build_optimizer(model))
    assert "muon=2 parameters" in text
    assert "adamw=3 parameters" in text
    assert "embedding: rows are looked up" in text
