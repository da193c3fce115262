"""Megatron's OptimizerConfig and our options: what is not given comes from Megatron, and nothing is ignored."""

from dataclasses import fields
from typing import Any

import pytest
from dist_pool import run_ranks

from hp_muon_plugin.config.choices import ScaleMode, Schedule
from hp_muon_plugin.config.optimizer import HpMuon, ScalarAdamW
from hp_muon_plugin.errors import ConfigError, ConfigErrors
from hp_muon_plugin.megatron import install
from hp_muon_plugin.megatron.options import COUNTERPARTS, HONOURED, REFUSED, WITHOUT_EFFECT, resolve_options
from hp_muon_plugin.megatron.versions import core_version
from hp_muon_plugin.train.setup import Launch
from lane.harness import dense, optimizer_config, train, train_config, wrapped_model

HAS_MUON = core_version().lane >= (0, 16)
HAS_ALL = core_version().lane >= (0, 19)


def _built(launch: Launch, given: Any, values: dict[str, Any]) -> Any:
    """The groups of a real model as the hooked factory makes them."""
    import megatron.core.optimizer as factory

    model = wrapped_model(launch)
    install(given)
    optimizer = factory.get_megatron_optimizer(optimizer_config(**values), [model])
    groups = {group["algorithm"]: group for group in reversed(optimizer.param_groups)}
    rates = {name: (group["lr"], group["min_lr"], group["weight_decay"]) for name, group in groups.items()}
    return rates, groups["adamw"]["betas"], groups["adamw"]["eps"], optimizer.optimizer.config


def test_options_that_were_not_given_come_from_megatron() -> None:
    """``install({'per_head': True})`` trained with lr 0.005, decay 0.1 and betas 0.9, 0.95 whatever Megatron said."""
    values = dict(lr=1e-2, min_lr=1e-3, weight_decay=0.02, adam_beta1=0.8, adam_beta2=0.999, adam_eps=1e-6)
    rates, betas, eps, options = run_ranks(1, _built, {"per_head": True}, values | {"clip_grad": 0.5})[0]
    assert rates == {"muon": (1e-2, 1e-3, 0.02), "adamw": (1e-2, 1e-3, 0.02)}
    assert (betas, eps) == ((0.8, 0.999), 1e-6)
    assert (options.per_head, options.clip_grad) == (True, 0.5)


def test_options_that_were_given_win_one_by_one() -> None:
    given = {"lr": 0.02, "clip_grad": 0.25, "adamw": {"lr": 4e-3}}
    rates, betas, _, options = run_ranks(1, _built, given, dict(lr=1e-2, min_lr=1e-3, weight_decay=0.02))[0]
    assert rates["muon"] == (0.02, pytest.approx(2e-3), 0.02)
    assert rates["adamw"] == (4e-3, pytest.approx(4e-4), 0.02)
    assert betas == (0.9, 0.999)
    assert options.clip_grad == 0.25


def test_typed_options_say_everything() -> None:
    given = HpMuon(lr=0.3, weight_decay=0.2, clip_grad=0.0, adamw=ScalarAdamW(betas=[0.7, 0.8]))
    assert resolve_options(given, optimizer_config(lr=0.1, clip_grad=1.0)) is given


def test_every_option_of_this_version_is_taken_refused_or_without_effect() -> None:
    from megatron.core.optimizer import OptimizerConfig

    names = {field.name for field in fields(OptimizerConfig)}
    theirs = {pair.theirs for pair in COUNTERPARTS}
    assert names <= theirs | REFUSED.keys() | HONOURED | WITHOUT_EFFECT
    assert not HONOURED & REFUSED.keys()
    ours = {field.name for field in fields(HpMuon)}
    assert {pair.ours for pair in COUNTERPARTS} <= ours


def test_an_option_of_a_newer_version_is_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    from dataclasses import make_dataclass

    from megatron.core.optimizer import OptimizerConfig

    newer = make_dataclass("Newer", [("muon_warp", float, 1.0)], bases=(OptimizerConfig,))
    resolve_options(None, newer(optimizer="hp_muon", lr=0.1))
    assert "muon_warp" not in caplog.text
    resolve_options(None, newer(optimizer="hp_muon", lr=0.1, muon_warp=2.0))
    assert "does not know these options of OptimizerConfig and ignores them: ['muon_warp']" in caplog.text


@pytest.mark.skipif(not HAS_MUON, reason="megatron-core has a Muon of its own from 0.16 on")
def test_options_of_megatrons_own_muon_are_taken() -> None:
    """They were ignored: muon_momentum=0.8 trained with 0.95."""
    nesterov = "muon_nesterov" if HAS_ALL else "muon_use_nesterov"
    values = dict(muon_momentum=0.8, muon_num_ns_steps=8, muon_split_qkv=False, muon_extra_scale_factor=0.5)
    found = resolve_options(None, optimizer_config(**values, **{nesterov: True, "muon_tp_mode": "duplicated"}))
    assert (found.momentum, found.steps, found.split_qkv, found.scale_factor) == (0.8, 8, False, 0.5)
    assert found.nesterov
    found = resolve_options({"adamw": {"lr": 1e-3}}, optimizer_config(muon_scale_mode="unit_rms_norm"))
    assert found.scale is ScaleMode.unit_rms
    assert resolve_options(None, optimizer_config(muon_tp_mode="distributed")).tp_mode == "distributed"
    assert resolve_options({"tp_mode": "owner"}, optimizer_config(muon_tp_mode="distributed")).tp_mode == "owner"
    defaults = resolve_options(None, optimizer_config())
    assert (defaults.momentum, defaults.scale, defaults.steps) == (0.95, ScaleMode.match_rms_adamw, None)
    assert defaults.tp_mode == "duplicated"  # Megatron's own default, blockwise, is not taken
    assert resolve_options({"momentum": 0.7}, optimizer_config(muon_momentum=0.8)).momentum == 0.7


@pytest.mark.skipif(not HAS_ALL, reason="muon_coefficient_type came with 0.19")
def test_coefficients_have_our_names() -> None:
    for theirs, ours in (("simple", Schedule.keller), ("polar_express", Schedule.polar_express)):
        assert resolve_options(None, optimizer_config(muon_coefficient_type=theirs)).schedule is ours
    with pytest.raises(ConfigError, match=r"muon_coefficient_type=aol: has no counterpart .*\n  fix: "):
        resolve_options(None, optimizer_config(muon_coefficient_type="aol"))
    assert resolve_options({"schedule": "keller"}, optimizer_config(muon_coefficient_type="aol")).steps is None


@pytest.mark.parametrize(
    ("values", "first"),
    [
        ({"loss_scale": 128.0}, (0, 12)),
        ({"sgd_momentum": 0.5}, (0, 12)),
        ({"overlap_param_gather_with_optimizer_step": True}, (0, 12)),
        ({"decoupled_weight_decay": False}, (0, 16)),
        ({"overlap_param_gather": True}, (0, 16)),
        ({"muon_fp32_matmul_prec": "high"}, (0, 16)),
        ({"use_layer_wise_distributed_optimizer": True}, (0, 19)),
        ({"muon_scalar_optimizer": "lion"}, (0, 19)),
        ({"optimizer_cuda_graph": True}, (0, 19)),
        ({"adaptive_muon_beta2": 0.5}, (0, 19)),
        ({"soap_shampoo_beta": 0.5}, (0, 19)),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_cannot_be_honoured_are_refused_by_name(values: dict[str, Any], first: tuple[int, int]) -> None:
    if core_version().lane < first:
        pytest.skip(f"this option came with megatron-core {first[0]}.{first[1]}")
    ((name, value),) = values.items()
    with pytest.raises(ConfigError, match=rf"^{name}={value}: .*\n  fix: "):
        resolve_options(None, optimizer_config(**values))


def test_all_refusals_come_together() -> None:
    with pytest.raises(ConfigErrors) as caught:
        resolve_options(None, optimizer_config(loss_scale=2.0, sgd_momentum=0.5))
    assert [error.option for error in caught.value.errors] == ["loss_scale", "sgd_momentum"]


def test_a_missing_learning_rate_is_named() -> None:
    """It was a TypeError: '>' not supported between NoneType and int."""
    with pytest.raises(ConfigError, match=r"^lr=None: .* has no learning rate\n  fix: set lr"):
        resolve_options(None, optimizer_config(lr=None, min_lr=None))
    assert resolve_options({"lr": 0.1}, optimizer_config(lr=None, min_lr=None)).lr == 0.1
    rates, *_ = run_ranks(1, _built, {"lr": 0.1}, dict(lr=None, min_lr=None))[0]
    assert rates["muon"] == (0.1, 0.0, 0.1)


def _arguments(launch: Launch, name: str, value: Any) -> str:
    from hp_muon_plugin.megatron.build import build_megatron_optimizer

    try:
        build_megatron_optimizer(optimizer_config(), [wrapped_model(launch)], arguments={name: value})
    except ConfigError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize(
    ("name", "value"), [("layer_wise_distributed_optimizer", True), ("dump_param_to_param_group_map", "map")]
)
def test_arguments_of_the_factory_that_would_be_ignored_are_refused(name: str, value: Any) -> None:
    assert run_ranks(1, _arguments, name, value)[0].startswith(f"{name}={value}: ")


def _above_the_threshold(launch: Launch) -> Any:
    import megatron.core.optimizer as factory

    from lane.harness import build

    ready = build(launch, train_config(dense()))
    core = optimizer_config(grad_norm_skip_threshold=1e-6, log_num_zeros_in_grad=True)
    ready.optimizer = ready.trainer._optimizer = factory.get_megatron_optimizer(core, [ready.model])
    before = [param.detach().clone() for param in ready.model.parameters()]
    train(ready, 1)
    same = all((a == b).all() for a, b in zip(before, ready.model.parameters(), strict=True))
    succeeded, norm, zeros = ready.optimizer.step()
    return same, succeeded, norm, zeros, ready.optimizer.num_skipped, bool(ready.optimizer.optimizer.state)


@pytest.mark.skipif(not HAS_ALL, reason="grad_norm_skip_threshold came with 0.19")
def test_a_step_above_megatrons_norm_threshold_is_left_out() -> None:
    same, succeeded, norm, zeros, skipped, has_state = run_ranks(1, _above_the_threshold)[0]
    assert same
    assert succeeded is False
    assert norm > 1e-6
    assert zeros is not None
    assert (skipped, has_state) == (2, False)
