"""The hooked factory builds the plugin's optimizer for real models, or refuses with the reason."""

import sys
import types
from typing import Any

import pytest
import torch
from dist_pool import run_ranks

from hp_muon_plugin.config.optimizer import AdamW
from hp_muon_plugin.config.trainer import Topology
from hp_muon_plugin.errors import ConfigError, HookError
from hp_muon_plugin.megatron import install
from hp_muon_plugin.megatron.installation import Select
from hp_muon_plugin.train.setup import Launch
from lane.harness import (
    build,
    moe,
    optimizer_config,
    train,
    train_config,
    whole_weights,
    wrapped_model,
)


def _names_kept_by_value(launch: Launch) -> list[str]:
    """A trainer that imported the factory by name before, and one that does after install()."""
    from megatron.core.optimizer import get_megatron_optimizer as before

    before_module = types.ModuleType("before_trainer")
    before_module.build = before  # type: ignore[attr-defined]
    sys.modules["before_trainer"] = before_module
    model = wrapped_model(launch)
    install()
    from megatron.core.optimizer import get_megatron_optimizer as after

    built = [before_module.build(optimizer_config(), [model]), after(optimizer_config(), [model])]
    return [type(optimizer).__name__ for optimizer in built]


def test_names_imported_before_and_after_get_the_same_optimizer() -> None:
    assert run_ranks(1, _names_kept_by_value)[0] == ["HpMuonMegatronOptimizer"] * 2


def _stale_closure(launch: Launch) -> list[str]:
    """A trainer that hid the original where no scan can find it."""
    from megatron.core.optimizer import get_megatron_optimizer

    def hidden(config: Any, chunks: Any, build: Any = get_megatron_optimizer) -> Any:
        return build(config, chunks)

    model = wrapped_model(launch)
    install(select=Select.always)
    messages = []
    try:
        hidden(optimizer_config("adam"), [model])
    except HookError as error:
        messages.append(str(error).splitlines()[0])
    late = types.ModuleType("late_trainer")
    late.build = get_megatron_optimizer  # type: ignore[attr-defined]
    sys.modules["late_trainer"] = late
    import megatron.core.optimizer as factory

    try:
        factory.get_megatron_optimizer(optimizer_config("adam"), [model])
    except HookError as error:
        messages.append(str(error).splitlines()[0])
    return messages


def test_a_bypass_is_an_error_and_never_a_silent_adamw() -> None:
    closure, alias = run_ranks(1, _stale_closure)[0]
    assert closure.startswith("hp_muon is selected, but megatron.core.optimizer")
    assert "was about to be built instead" in closure
    assert alias.startswith("late_trainer.build still is Megatron's own get_megatron_optimizer")


def _never_used(launch: Launch) -> str:
    report = install(select="always")
    try:
        report.assert_used()
    except HookError as error:
        return str(error)
    return ""


def test_an_installation_that_nobody_used_is_an_error_on_request() -> None:
    assert "built its optimizer by another way" in run_ranks(1, _never_used)[0]


def _always(launch: Launch) -> str:
    import megatron.core.optimizer as factory

    model = wrapped_model(launch)
    report = install(select="always")
    name = type(factory.get_megatron_optimizer(optimizer_config("adam"), [model])).__name__
    report.assert_used()
    return name


def test_a_carrier_name_can_be_taken_over() -> None:
    assert run_ranks(1, _always)[0] == "HpMuonMegatronOptimizer"


def _adamw(launch: Launch, with_plugin: bool) -> Any:
    config = train_config(moe(), Topology(ep=launch.world_size), optimizer=AdamW(lr=3e-3))
    if with_plugin:
        install()
    ready = train(build(launch, config), 6)
    return whole_weights(ready), ready.losses, ready.norms, type(ready.optimizer).__module__


@pytest.mark.parametrize("ranks", [1, 2])
def test_adamw_with_the_plugin_installed_is_megatrons_own_bit_for_bit(ranks: int) -> None:
    plain, hooked = run_ranks(ranks, _adamw, False), run_ranks(ranks, _adamw, True)
    for (weights, losses, norms, module), (others, other_losses, other_norms, _) in zip(plain, hooked, strict=True):
        assert module.startswith("megatron.core")
        assert (losses, norms) == (other_losses, other_norms)
        assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"fp16": True}, "fp16=True: needs dynamic loss scaling"),
        ({"use_distributed_optimizer": True}, "use_distributed_optimizer=True: its flat shards cut matrices"),
        ({"optimizer_cpu_offload": True}, "optimizer_cpu_offload=True"),
    ],
)
def test_options_that_cannot_work_are_refused_with_the_reason(values: dict[str, Any], message: str) -> None:
    (text,) = run_ranks(1, _refused, values)
    assert text.startswith(message)
    assert "\n  fix: " in text


def _refused(launch: Launch, values: dict[str, Any]) -> str:
    import megatron.core.optimizer as factory

    model = wrapped_model(launch)
    install()
    config = optimizer_config()
    for name, value in values.items():
        setattr(config, name, value)
    try:
        factory.get_megatron_optimizer(config, [model])
    except ConfigError as error:
        return str(error)
    return "not refused"


def _unwrapped(launch: Launch) -> str:
    import megatron.core.optimizer as factory

    model = wrapped_model(launch)
    install()
    try:
        factory.get_megatron_optimizer(optimizer_config(), [model.module])
    except ConfigError as error:
        return str(error)
    return "not refused"


def test_an_unknown_wrapper_is_refused() -> None:
    assert "reads gradients from Megatron's DistributedDataParallel" in run_ranks(1, _unwrapped)[0]
