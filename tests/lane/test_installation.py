"""install() and uninstall() on the real megatron-core of this lane, without a model."""

import subprocess
import sys
import types
from typing import Any

import pytest

from hp_muon_plugin.cli.doctor import _hook_lines
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.errors import ConfigError, HookError
from hp_muon_plugin.megatron import install, uninstall
from hp_muon_plugin.megatron.hooks import HOOKS, Hook, HookKind, check_signature, put, resolve
from hp_muon_plugin.megatron.installation import installed
from hp_muon_plugin.megatron.versions import CoreVersion, check_tested, core_version, parse_version


@pytest.mark.once
def test_importing_the_plugin_changes_nothing_of_megatron() -> None:
    """In a process of its own, as the tests' own has installed before."""
    code = """
import megatron.core.distributed, megatron.core.optimizer, megatron.core.optimizer.optimizer_config
modules = [megatron.core.optimizer, megatron.core.distributed, megatron.core.optimizer.optimizer_config]
before = [dict(vars(module)) for module in modules]
import importlib, pkgutil, hp_muon_plugin.megatron as plugin
names = [module.name for module in pkgutil.iter_modules(plugin.__path__)]
for name in names:
    if name != "registry":  # from 0.19 on
        importlib.import_module(f"hp_muon_plugin.megatron.{name}")
print("installation" in names, [dict(vars(module)) == kept for module, kept in zip(modules, before)])
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "True [True, True, True]\n", done.stdout + done.stderr


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


def test_a_method_that_somebody_keeps_is_left_to_him(monkeypatch: pytest.MonkeyPatch) -> None:
    """He keeps it to call the original: hooked there too, it would be hooked twice."""
    from megatron.core.distributed import DistributedDataParallel

    kept = types.ModuleType("some_patcher")
    kept.original = init = DistributedDataParallel.__init__  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_patcher", kept)
    install()
    assert kept.original is init
    assert DistributedDataParallel.__init__ is not init
    uninstall()
    assert DistributedDataParallel.__init__ is init


def test_installing_with_other_arguments_is_an_error() -> None:
    install(HpMuon(lr=0.1))
    with pytest.raises(HookError, match="called before with other arguments"):
        install(HpMuon(lr=0.2))


def test_settings_may_be_a_mapping_and_are_checked() -> None:
    report = install({"lr": 0.5, "scale": "spectral", "adamw": {"lr": 1e-3}})
    assert report.given == {"lr": 0.5, "scale": "spectral", "adamw": {"lr": 1e-3}}
    assert install({"lr": 0.5, "scale": "spectral", "adamw": {"lr": 1e-3}}) is report
    uninstall()
    with pytest.raises(ConfigError, match="did you mean optimizer.momentum"):
        install({"momentm": 0.5})
    assert installed() is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"select": "alwys"}, "select=alwys: there is no such way to select"),
        ({"settings": "hp_muon"}, "optimizer=hp_muon: is no mapping of options"),
        ({"data_parallel": True}, "data_parallel=True: is no mapping of options"),
    ],
)
def test_a_wrong_kind_of_argument_is_told(arguments: dict[str, Any], message: str) -> None:
    """They were a ValueError of enum, and an AttributeError of str and bool."""
    with pytest.raises(ConfigError, match=message):
        install(**arguments)
    assert installed() is None


def test_only_the_hooks_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HP_MUON_HOOKS", "optimizer")
    assert [entry.hook.name for entry in install().hooks] == ["optimizer"]
    uninstall()
    monkeypatch.setenv("HP_MUON_HOOKS", "optimiser")
    with pytest.raises(HookError, match="HP_MUON_HOOKS=optimiser: no such hook"):
        install()


def test_hooks_that_could_never_build_the_optimizer_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told when the script had ended: ``registry`` alone knows the name hp_muon, and the carrier is adam."""
    monkeypatch.setenv("HP_MUON_HOOKS", "registry,wrapper")
    with pytest.raises(HookError, match=r"(?s)to take the place of every optimizer.*fix: add the hook 'optimizer'"):
        install(select="always")
    assert installed() is None


def test_a_changed_signature_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron.core.optimizer as factory

    def moved(settings: Any, model_chunks: Any) -> None: ...

    monkeypatch.setattr(factory, "get_megatron_optimizer", moved)
    with pytest.raises(HookError, match="get_megatron_optimizer has no parameter config any more"):
        install()
    assert installed() is None
    assert factory.get_megatron_optimizer is moved
    assert any("get_megatron_optimizer has no parameter config any more" in problem for problem in _hook_lines())


def test_a_missing_target_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron.core.optimizer as factory

    monkeypatch.delattr(factory, "get_megatron_optimizer")
    with pytest.raises(HookError, match=r"has no megatron\.core\.optimizer\.get_megatron_optimizer"):
        install()
    assert any("has no megatron.core.optimizer.get_megatron_optimizer" in problem for problem in _hook_lines())


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
