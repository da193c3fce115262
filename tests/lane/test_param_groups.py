"""Parameter groups: whatever a trainer says about learning rates and weight decay holds."""

from typing import Any

import pytest
from dist_pool import run_ranks

from hp_muon_plugin.config.optimizer import HpMuon, ScalarAdamW
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.megatron import install, uninstall
from hp_muon_plugin.megatron.versions import core_version
from hp_muon_plugin.train import setup
from hp_muon_plugin.train.setup import Launch
from lane.harness import VOCAB, dense, optimizer_config, start, train_config, wrapped_model


def _groups(launch: Launch) -> Any:
    """Whatever a trainer passes to the factory about weight decay and learning rates holds."""
    import megatron.core.optimizer as factory

    from hp_muon_plugin.train import setup

    config = train_config(dense())
    platform = start(launch, config)
    model, _ = setup.build_model(config, VOCAB, platform)
    settings = HpMuon(lr=0.02, weight_decay=0.2, adamw=ScalarAdamW(lr=0.002, weight_decay=0.05))
    uninstall()
    install(settings)
    core = factory.OptimizerConfig(optimizer="hp_muon", lr=0.01, min_lr=0.001, weight_decay=0.1)
    if core_version().lane < (0, 16):
        extra = {
            "no_weight_decay_cond": lambda name, param: "linear_fc2" in name or param.dim() == 1,
            "scale_lr_cond": lambda name, param: "linear_proj" in name,
            "lr_mult": 0.5,
        }
    else:
        from megatron.core.optimizer import ParamKey
        from megatron.core.optimizer_param_scheduler import ParamGroupOverride

        extra = {
            "config_overrides": {
                ParamKey(name="*linear_fc2*"): ParamGroupOverride(wd_mult=0.0),
                ParamKey(name="*norm*"): ParamGroupOverride(wd_mult=0.0),
                ParamKey(name="*linear_proj*"): ParamGroupOverride(max_lr=0.005, min_lr=0.0005),
            }
        }
    optimizer = factory.get_megatron_optimizer(core, [model], **extra)
    config.optimizer.lr, config.optimizer.weight_decay = 0.01, 0.1
    config.lr_schedule.warmup_steps = 0
    setup.build_schedule(config, optimizer)
    return _found(optimizer)


def _found(optimizer: Any) -> dict[str, tuple[str, float, float]]:
    """Algorithm, learning rate and weight decay of each parameter by name."""
    pairs = zip(optimizer._pairs, optimizer._counted, strict=True)
    names = {pair.main: counted.spec.name for pair, counted in pairs}
    return {
        names[param]: (group["algorithm"], group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for param in group["params"]
    }


def test_weight_decay_and_learning_rate_conditions_of_the_trainer_hold() -> None:
    found = run_ranks(1, _groups)[0]
    assert found["decoder.layers.0.self_attention.linear_qkv.weight"] == (
        "muon",
        pytest.approx(0.02),
        pytest.approx(0.2),
    )
    assert found["decoder.layers.0.mlp.linear_fc2.weight"] == ("muon", pytest.approx(0.02), 0.0)
    rate = 0.01 if core_version().lane < (0, 16) else 0.005
    assert found["decoder.layers.0.self_attention.linear_proj.weight"] == (
        "muon",
        pytest.approx(rate),
        pytest.approx(0.2),
    )
    assert found["embedding.word_embeddings.weight"] == ("adamw", pytest.approx(0.002), pytest.approx(0.05))
    assert found["decoder.layers.0.input_layernorm.weight"] == ("adamw", pytest.approx(0.002), 0.0)


def _decoupled(launch: Launch) -> Any:
    """Megatron's ``--decoupled-lr``: embedding and output layer have a learning rate of their own."""
    import megatron.core.optimizer as factory

    model = wrapped_model(launch)
    uninstall()
    install(HpMuon(lr=0.02, adamw=ScalarAdamW(lr=0.002)))
    core = optimizer_config(decoupled_lr=0.004, decoupled_min_lr=0.0004)
    optimizer = factory.get_megatron_optimizer(core, [model])
    ends = {(group["min_lr"], group["max_lr"]) for group in optimizer.param_groups if group["max_lr"] == 0.004}
    return _found(optimizer), ends, optimizer.get_loss_scale()


def test_a_decoupled_learning_rate_is_that_of_embedding_and_output_and_no_loss_is_scaled() -> None:
    found, ends, scale = run_ranks(1, _decoupled)[0]
    rates = {name: (algorithm, lr) for name, (algorithm, lr, _) in found.items()}
    assert rates.pop("embedding.word_embeddings.weight") == ("adamw", 0.004)
    assert rates.pop("output_layer.weight") == ("adamw", 0.004)
    assert set(rates.values()) == {("muon", 0.02), ("adamw", 0.002)}
    assert ends == {(0.0004, 0.004)}
    assert scale.shape == (1,)
    assert float(scale) == 1.0


def _zero_decay(launch: Launch) -> str:
    import megatron.core.optimizer as factory

    from hp_muon_plugin.train import setup

    config = train_config(dense())
    model, _ = setup.build_model(config, VOCAB, start(launch, config))
    uninstall()
    install(HpMuon(lr=0.02, weight_decay=0.2))
    core = factory.OptimizerConfig(optimizer="hp_muon", lr=0.01, min_lr=0.001, weight_decay=0.0)
    try:
        factory.get_megatron_optimizer(core, [model])
    except ConfigError as error:
        return str(error)
    return "not refused"


def test_a_schedule_that_would_zero_the_weight_decay_is_refused() -> None:
    assert "multiply their own weight decay, which is 0 here" in run_ranks(1, _zero_decay)[0]


def _without_settings(launch: Launch) -> Any:
    import megatron.core.optimizer as factory

    from hp_muon_plugin.train import setup

    config = train_config(dense())
    model, _ = setup.build_model(config, VOCAB, start(launch, config))
    uninstall()
    install()
    core = factory.OptimizerConfig(
        optimizer="hp_muon", lr=0.03, min_lr=0.003, weight_decay=0.07, adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-6
    )
    optimizer = factory.get_megatron_optimizer(core, [model])
    return [(g["algorithm"], g["lr"], g["weight_decay"], g.get("betas"), g.get("eps")) for g in optimizer.param_groups]


def test_without_settings_everything_comes_from_megatrons_configuration() -> None:
    groups = run_ranks(1, _without_settings)[0]
    assert ("muon", 0.03, 0.07, None, None) in groups
    assert ("adamw", 0.03, 0.07, (0.8, 0.9), 1e-6) in groups


def _overrides(launch: Launch) -> Any:
    """Overrides of one value each, with a learning rate and a decay of the plugin's own."""
    import megatron.core.optimizer as factory
    from megatron.core.optimizer import ParamKey
    from megatron.core.optimizer_param_scheduler import ParamGroupOverride

    model = wrapped_model(launch)
    install({"lr": 0.02, "weight_decay": 0.2})
    overrides = {
        ParamKey(name="*linear_proj*"): ParamGroupOverride(min_lr=0.007),
        ParamKey(name="*linear_fc2*"): ParamGroupOverride(start_wd=0.03, end_wd=0.03),
    }
    optimizer = factory.get_megatron_optimizer(optimizer_config(), [model], config_overrides=overrides)
    config = train_config(dense(), optimizer=HpMuon(lr=0.01, weight_decay=0.1), steps=10)
    schedule = setup.build_schedule(config, optimizer)
    schedule.step(increment=20)  # past the end of the decay
    specs = {counted.main: counted.spec.name for counted in optimizer._counted}
    return {specs[p]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}


@pytest.mark.skipif(core_version().lane < (0, 16), reason="config_overrides came with 0.16")
def test_an_override_of_one_value_leaves_the_others_to_the_plugin_and_is_not_lost() -> None:
    """A min_lr of an override was replaced by the plugin's, and an absolute decay scaled."""
    found = run_ranks(1, _overrides)[0]
    assert found["decoder.layers.0.self_attention.linear_proj.weight"] == (0.007, pytest.approx(0.2))
    assert found["decoder.layers.0.mlp.linear_fc2.weight"] == (pytest.approx(0.002), 0.03)
    assert found["decoder.layers.0.self_attention.linear_qkv.weight"] == (pytest.approx(0.002), pytest.approx(0.2))


def _optimizer_override(launch: Launch) -> str:
    import megatron.core.optimizer as factory
    from megatron.core.optimizer import ParamKey

    model = wrapped_model(launch)
    install()
    try:
        overrides = {ParamKey(name="*linear_proj*"): {"optimizer": "adam"}}
        factory.get_megatron_optimizer(optimizer_config(), [model], config_overrides=overrides)
    except ConfigError as error:
        return str(error)
    return "not refused"


@pytest.mark.skipif(core_version().lane < (0, 19), reason="overrides of the optimizer came with 0.19")
def test_an_override_of_the_optimizer_is_refused() -> None:
    assert run_ranks(1, _optimizer_override)[0].startswith("config_overrides.optimizer=adam: ")
