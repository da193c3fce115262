"""install() and uninstall() on the real megatron-core of this lane."""

import sys
import types
from typing import Any

import pytest
import torch
from dist_pool import run_ranks

from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.config.trainer import Topology
from hp_muon_plugin.errors import ConfigError, HookError
from hp_muon_plugin.megatron import install, uninstall
from hp_muon_plugin.megatron.hooks import HOOKS, Hook, HookKind, check_signature, put, resolve
from hp_muon_plugin.megatron.installation import Select, installed
from hp_muon_plugin.megatron.versions import CoreVersion, check_tested, core_version, parse_version
from hp_muon_plugin.train.setup import Launch
from lane.harness import VOCAB, build, dense, moe, start, train, train_config, whole_weights


@pytest.fixture(autouse=True)
def _clean() -> Any:
    uninstall()
    yield
    uninstall()


def test_every_hook_has_a_target_with_its_parameters() -> None:
    for hook in HOOKS:
        if hook.applies(core_version()):
            *_, function = resolve(hook)
            check_signature(hook, function)
        assert len(hook.why) > 20
        assert hook.remove_when


def test_install_is_idempotent_reversible_and_reports() -> None:
    import megatron.core.optimizer as factory
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    original, init = factory.get_megatron_optimizer, MegatronOptimizer.__init__
    holder = types.ModuleType("some_trainer")
    holder.get_megatron_optimizer = original  # type: ignore[attr-defined]
    sys.modules["some_trainer"] = holder
    try:
        report = install()
        assert install() is report
        assert installed() is report
        assert factory.get_megatron_optimizer is not original
        assert holder.get_megatron_optimizer is factory.get_megatron_optimizer
        assert "some_trainer.get_megatron_optimizer" in str(report)
        assert factory.get_megatron_optimizer.__wrapped__ is original
        uninstall()
        assert factory.get_megatron_optimizer is original
        assert holder.get_megatron_optimizer is original
        assert MegatronOptimizer.__init__ is init
        assert installed() is None
    finally:
        del sys.modules["some_trainer"]


def test_installing_with_other_arguments_is_an_error() -> None:
    install(HpMuon(lr=0.1))
    with pytest.raises(HookError, match="called before with other arguments"):
        install(HpMuon(lr=0.2))


def test_settings_may_be_a_mapping_and_are_checked() -> None:
    report = install({"lr": 0.5, "scale": "spectral", "adamw": {"lr": 1e-3}})
    assert report.settings is not None
    assert report.settings.lr == 0.5
    uninstall()
    with pytest.raises(ConfigError, match="did you mean optimizer.momentum"):
        install({"momentm": 0.5})
    assert installed() is None


def test_only_the_hooks_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HP_MUON_HOOKS", "optimizer")
    assert [entry.hook.name for entry in install().hooks] == ["optimizer"]
    uninstall()
    monkeypatch.setenv("HP_MUON_HOOKS", "optimiser")
    with pytest.raises(HookError, match="HP_MUON_HOOKS=optimiser: no such hook"):
        install()


def test_a_changed_signature_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron.core.optimizer as factory

    def moved(settings: Any, model_chunks: Any) -> None: ...

    monkeypatch.setattr(factory, "get_megatron_optimizer", moved)
    with pytest.raises(HookError, match="get_megatron_optimizer has no parameter config any more"):
        install()
    assert installed() is None
    assert factory.get_megatron_optimizer is moved


def test_a_missing_target_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron.core.optimizer as factory

    monkeypatch.delattr(factory, "get_megatron_optimizer")
    with pytest.raises(HookError, match=r"has no megatron\.core\.optimizer\.get_megatron_optimizer"):
        install()


def test_a_grown_contract_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    grown = frozenset({*MegatronOptimizer.__abstractmethods__, "new_duty"})
    monkeypatch.setattr(MegatronOptimizer, "__abstractmethods__", grown)
    with pytest.raises(HookError, match="new: new_duty"):
        install()


def test_another_muon_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron.core.optimizer as factory

    def get_megatron_optimizer_muon_wrapper(config: Any, model_chunks: Any) -> None: ...

    get_megatron_optimizer_muon_wrapper.__module__ = "mindspeed.core.optimizer.muon.adaptor"
    monkeypatch.setattr(factory, "get_megatron_optimizer", get_megatron_optimizer_muon_wrapper)
    with pytest.raises(HookError, match="another Muon"):
        install()


def test_a_later_replacement_is_not_thrown_away() -> None:
    import megatron.core.optimizer as factory

    install()
    ours = factory.get_megatron_optimizer
    factory.get_megatron_optimizer = lambda *args, **kwargs: ours(*args, **kwargs)
    try:
        with pytest.raises(HookError, match="was replaced again after install"):
            uninstall()
    finally:
        factory.get_megatron_optimizer = ours
    uninstall()


def test_untested_versions_are_refused_unless_allowed() -> None:
    assert parse_version("0.19.0rc2+abc") == CoreVersion(0, 19, 0)
    check_tested(CoreVersion(0, 16, 4), allow_untested=False)
    with pytest.raises(HookError, match=r"megatron-core 0\.14\.0 is not tested.*\n  fix:"):
        check_tested(CoreVersion(0, 14, 0), allow_untested=False)
    check_tested(CoreVersion(0, 14, 0), allow_untested=True)


def test_put_takes_hooks_as_data() -> None:
    module = types.ModuleType("target_module")
    module.function = lambda config, model_chunks: "original"  # type: ignore[attr-defined]
    sys.modules["target_module"] = module
    try:
        hook = Hook("x", "target_module", "function", HookKind.factory, ("config",), (0, 12), (0, 19), "why", "when")
        done = put(hook, lambda original: lambda *a, **k: "ours")
        assert module.function(1, 2) == "ours"
        assert done.original(1, 2) == "original"
    finally:
        del sys.modules["target_module"]


def _optimizer_config(name: str = "hp_muon", **values: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    return OptimizerConfig(optimizer=name, lr=0.01, min_lr=0.001, weight_decay=0.1, **values)


def _wrapped(launch: Launch) -> torch.nn.Module:
    from hp_muon_plugin.train import setup

    config = train_config(dense())
    platform = start(launch, config)
    return setup.build_model(config, VOCAB, platform)[0]


def _names_kept_by_value(launch: Launch) -> list[str]:
    """A trainer that imported the factory by name before, and one that does after install()."""
    from megatron.core.optimizer import get_megatron_optimizer as before

    before_module = types.ModuleType("before_trainer")
    before_module.build = before  # type: ignore[attr-defined]
    sys.modules["before_trainer"] = before_module
    model = _wrapped(launch)
    install()
    from megatron.core.optimizer import get_megatron_optimizer as after

    built = [before_module.build(_optimizer_config(), [model]), after(_optimizer_config(), [model])]
    return [type(optimizer).__name__ for optimizer in built]


def test_names_imported_before_and_after_get_the_same_optimizer() -> None:
    assert run_ranks(1, _names_kept_by_value)[0] == ["HpMuonMegatronOptimizer"] * 2


def _stale_closure(launch: Launch) -> list[str]:
    """A trainer that hid the original where no scan can find it."""
    from megatron.core.optimizer import get_megatron_optimizer

    def hidden(config: Any, chunks: Any, build: Any = get_megatron_optimizer) -> Any:
        return build(config, chunks)

    model = _wrapped(launch)
    install(select=Select.always)
    messages = []
    try:
        hidden(_optimizer_config("adam"), [model])
    except HookError as error:
        messages.append(str(error).splitlines()[0])
    late = types.ModuleType("late_trainer")
    late.build = get_megatron_optimizer  # type: ignore[attr-defined]
    sys.modules["late_trainer"] = late
    import megatron.core.optimizer as factory

    try:
        factory.get_megatron_optimizer(_optimizer_config("adam"), [model])
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

    model = _wrapped(launch)
    report = install(select="always")
    name = type(factory.get_megatron_optimizer(_optimizer_config("adam"), [model])).__name__
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

    model = _wrapped(launch)
    install()
    config = _optimizer_config()
    for name, value in values.items():
        setattr(config, name, value)
    try:
        factory.get_megatron_optimizer(config, [model])
    except ConfigError as error:
        return str(error)
    return "not refused"


def _unwrapped(launch: Launch) -> str:
    import megatron.core.optimizer as factory

    model = _wrapped(launch)
    install()
    try:
        factory.get_megatron_optimizer(_optimizer_config(), [model.module])
    except ConfigError as error:
        return str(error)
    return "not refused"


def test_an_unknown_wrapper_is_refused() -> None:
    assert "reads gradients from Megatron's DistributedDataParallel" in run_ranks(1, _unwrapped)[0]
