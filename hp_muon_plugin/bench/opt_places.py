"""Where peers run: in this interpreter, in one that the user names, or in an environment that pip makes."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hp_muon_plugin.bench.opt_contenders import Peer
from hp_muon_plugin.errors import ConfigError

_PINNED = "torch==2.13.0"
_DONE = "hp-muon-requirements.json"
_INSTALL_S = 1800.0
_LATER_VERSIONS = 3  # minor versions that count as good as the one that is needed
_PROBE = """
import importlib.util, json, sys
def is_there(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
print(json.dumps([name for name in sys.argv[1:] if is_there(name)]))
"""


@dataclass(slots=True)
class Places:
    """Where everybody runs.

    Attributes:
        python: Interpreter by peer.
        absent: Why a peer does not run, and how to get it.
    """

    python: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


def find_places(
    peers: Mapping[str, Peer], *, named: Mapping[str, str], folder: Path | None, replicas: int, is_here_only: bool
) -> Places:
    """Find an interpreter for every peer, and install what is missing if there is a folder for it.

    Args:
        peers: Who is wanted.
        named: Interpreters that the user named, by peer.
        folder: Where environments are made and found again; None to install nothing.
        replicas: Size of the replicate axis.
        is_here_only: Whether all ranks are of this interpreter, as on the testbed.

    Returns:
        The places.
    """
    places = Places()
    wanted = {}
    for name, peer in peers.items():
        if replicas > 1 and not peer.has_replicas:
            places.absent[name] = "has no form for a mesh with replicas"
        else:
            wanted[name] = peer
    here = _importable(sys.executable, {name: peer for name, peer in wanted.items() if name not in named})
    places.python = dict.fromkeys(here, sys.executable)
    if is_here_only:
        missing = [name for name in wanted if name not in places.python]
        return Places(places.python, places.absent | dict.fromkeys(missing, "not in this interpreter"))
    for name, python in named.items():
        if name in wanted:
            _take(places, name, wanted[name], python)
    rest = {name: peer for name, peer in wanted.items() if name not in places.python and name not in places.absent}
    if folder is not None:
        _install(places, rest, folder)
    for name in rest:
        if name not in places.python:
            places.absent.setdefault(name, f"not installed; {rest[name].how_to_get}")
    return places


def _take(places: Places, name: str, peer: Peer, python: str) -> None:
    if _importable(python, {name: peer}):
        places.python[name] = python
    else:
        places.absent[name] = f"{peer.module} is not in {python}"


def _importable(python: str, peers: Mapping[str, Peer]) -> list[str]:
    """Who can be imported in an interpreter; only the specs are looked for."""
    modules = sorted({peer.module for peer in peers.values()})
    if python == sys.executable:
        found = [module for module in modules if _has(module)]
    else:
        try:
            result = subprocess.run(
                [python, "-W", "ignore", "-c", _PROBE, *modules], capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise ConfigError("--peer-python", python, f"does not run: {error}", "give a Python's path") from None
        found = json.loads(result.stdout.strip().splitlines()[-1])
    return [name for name, peer in peers.items() if peer.module in found]


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _install(places: Places, peers: Mapping[str, Peer], folder: Path) -> None:
    for environment in sorted({peer.venv for peer in peers.values() if peer.requirements or peer.no_dependencies}):
        members = {name: peer for name, peer in peers.items() if peer.venv == environment}
        try:
            python = _environment(folder / environment, list(members.values()))
        except _InstallError as error:
            places.absent |= dict.fromkeys(members, str(error))
            continue
        for name, peer in members.items():
            _take(places, name, peer, python)


class _InstallError(Exception):
    """An environment could not be made."""


def _environment(path: Path, peers: Sequence[Peer]) -> str:
    """The interpreter of an environment that has these peers; made anew unless it is there."""
    plain = sorted({text for peer in peers for text in peer.requirements})
    bare = sorted({text for peer in peers for text in peer.no_dependencies})
    wanted = {"plain": [_PINNED, *plain], "no dependencies": bare}
    python, done = path / "bin" / "python", path / _DONE
    if done.is_file() and json.loads(done.read_text(encoding="utf-8")) == wanted and python.is_file():
        return str(python)
    base = _base(max(peer.needs_python for peer in peers))
    _run([base, "-m", "venv", "--clear", str(path)])
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    _run([*pip, "setuptools", *wanted["plain"]])
    if bare:
        _run([*pip, "--no-deps", *bare])
    done.write_text(json.dumps(wanted), encoding="utf-8")
    return str(python)


def _base(least: tuple[int, int]) -> str:
    if sys.version_info >= least:
        return sys.executable
    names = [f"python{least[0]}.{least[1] + later}" for later in range(_LATER_VERSIONS)]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    candidates = [found for name in names if (found := shutil.which(name)) is not None]
    candidates += [str(found) for name in names for found in sorted(pyenv.glob(f"*/bin/{name}"), reverse=True)]
    for candidate in candidates:
        if _starts(candidate):
            return candidate
    raise _InstallError(f"needs {names[0]} or later, which is neither on PATH nor among pyenv's versions")


def _starts(python: str) -> bool:
    """Whether it runs: a shim of pyenv may stand for a version that is not chosen."""
    try:
        return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _run(command: Sequence[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _InstallError(f"could not be installed: {error}") from None
    if result.returncode:
        lines = [line for line in result.stderr.strip().splitlines() if line.strip() and "WARNING" not in line]
        told = [line for line in lines if line.startswith("ERROR")][-1:] or lines[:1] or [str(result.returncode)]
        raise _InstallError(f"could not be installed: {told[0]}")
