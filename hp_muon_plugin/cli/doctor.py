"""``hp-muon doctor``: versions, platform, hooks, and what would not work and why."""

import os
import platform as machine
import sys
import warnings
from importlib import metadata

import hp_muon_plugin
from hp_muon_plugin.errors import HookError, HpMuonError
from hp_muon_plugin.platform.collecting import without_collecting

_PACKAGES = (
    "torch",
    "torch-npu",
    "megatron-core",
    "mindspeed",
    "transformer-engine",
    "emerging-optimizers",
    "hydra-core",
    "omegaconf",
    "numpy",
    "tensorboard",
    "wandb",
    "matplotlib",
)


def run(arguments: list[str]) -> int:
    """Print the report.

    Args:
        arguments: None are taken.

    Returns:
        0 if ``hp-muon train optimizer=hp_muon`` can work here, 1 if not, 2 for arguments.
    """
    if arguments:
        print(f"hp-muon doctor takes no arguments, got {' '.join(arguments)}", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore", module=r"(megatron|torch|transformer_engine|apex)\b.*")  # as when training
    print(f"hp_muon_plugin {hp_muon_plugin.__version__}, Python {machine.python_version()}, {machine.platform()}")
    for package in _PACKAGES:
        print(f"  {package:<20} {_version(package)}")
    for note in _notes():
        print(f"  {note}")
    with without_collecting():  # what is looked at is imported
        problems = [*_platform_lines(), *_hook_lines(), *_variable_problems()]
    print("problems" if problems else "no problems found")
    for problem in problems:
        print(f"  {problem}")
    return 1 if problems else 0


def _notes() -> list[str]:
    """What the default ``hp-muon train`` does without."""
    from hp_muon_plugin.train.metrics import has_tensorboard

    if has_tensorboard():
        return []
    return ["without tensorboard metrics go to metrics.jsonl only: pip install 'hp_muon_plugin[log]'"]


def _variable_problems() -> list[str]:
    from hp_muon_plugin.megatron.versions import core_version
    from hp_muon_plugin.train.preflight import HOOKS_VARIABLE, check_hooks_variable

    value = os.environ.get(HOOKS_VARIABLE)
    try:
        check_hooks_variable(value, core_version())
    except HookError as error:
        return [str(error)] if value else []  # a missing megatron-core is named by the hooks already
    return []


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"


def _platform_lines() -> list[str]:
    """Print the platforms; return problems."""
    from hp_muon_plugin.config.choices import PlatformName
    from hp_muon_plugin.platform.base import available, choose

    print("platforms")
    for name in (PlatformName.npu, PlatformName.cuda, PlatformName.cpu):
        print(f"  {name:<20} {'available' if available(name) else 'no device'}")
    chosen = choose(PlatformName.auto)
    print(f"  {'auto takes':<20} {chosen.name} with {chosen.backend}")
    if chosen.name is PlatformName.cpu:
        from hp_muon_plugin.platform import standin

        try:
            standin.activate()
        except HpMuonError as error:
            return [str(error)]
    return []


def _hook_lines() -> list[str]:
    """Print the hooks against the installed megatron-core; return problems."""
    from hp_muon_plugin.megatron.hooks import HOOKS, check_signature, resolve
    from hp_muon_plugin.megatron.versions import check_tested, core_version

    try:
        version = core_version()
    except HookError as error:
        return [str(error)]
    print(f"hooks into megatron-core {version}")
    problems = []
    try:
        check_tested(version, allow_untested=False)
    except HookError as error:
        problems.append(str(error))
    for hook in HOOKS:
        if not hook.applies(version):
            print(f"  {hook.name:<14} not needed by this version")
            continue
        try:
            *_, function = resolve(hook)
            check_signature(hook, function)
        except HookError as error:
            problems.append(str(error))
            continue
        print(f"  {hook.name:<14} {hook.kind} at {hook.target}")
        print(f"  {'':<14} why: {hook.why}")
    return problems


if __name__ == "__main__":
    from hp_muon_plugin.cli.main import run_module

    run_module("doctor")
