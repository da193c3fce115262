"""The test run: lint, tests, and one lane per megatron-core version that an interpreter is found for.

`make test` calls this from .venv. The lane of .venv's own megatron-core runs there; each other lane
gets an environment of its own under .nox, which is begun while lint and the main tests run.
"""

import os
import shutil
import subprocess
import sys
import threading
from importlib import metadata
from pathlib import Path

import nox

nox.options.reuse_existing_virtualenvs = True
nox.options.stop_on_first_error = False
# Some machines switch bytecode off. Here hundreds of processes import the same files.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# megatron-core version -> Python versions that it can be installed on, best first.
LANES = {
    "0.12.1": ("3.11",),
    "0.16.1": ("3.11",),
    "0.19.2": ("3.12", "3.13"),
}
LANE_PACKAGES = (
    "psutil",
    "einops",
    "pytest",
    "pytest-rerunfailures",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "tensorboard",
)
# Megatron's own Muon of 0.19 needs it; converted checkpoints of it are loaded there.
LANE_EXTRAS = {"0.19.2": ("emerging-optimizers",)}
# Ranks mostly wait for each other, so that three processes on two cores are faster than one, and steady. Among the main
# tests are those that wait for time limits and for interrupted runs to end: they leave a third of the cores idle.
IN_PARALLEL = ("--numprocesses", "3", "--dist", "worksteal")
MAIN_IN_PARALLEL = ("--numprocesses", "4", "--dist", "worksteal")
LANE_TESTS = "tests/lane"
RESULTS: list[str] = []
MAKERS: list[threading.Thread] = []


def interpreter(versions: tuple[str, ...]) -> str | None:
    """Path of an interpreter of one of these versions: the running one, on PATH, or of pyenv."""
    for version in versions:
        if version == f"{sys.version_info.major}.{sys.version_info.minor}":
            return sys.executable
        for candidate in (shutil.which(f"python{version}"), pyenv_python(version)):
            if candidate and runs(candidate, version):
                return candidate
    return None


def pyenv_python(version: str) -> str | None:
    """The newest Python of this minor version that pyenv holds."""
    if shutil.which("pyenv") is None:
        return None
    listed = subprocess.run(["pyenv", "versions", "--bare"], capture_output=True, text=True, check=False).stdout
    matching = [line.strip() for line in listed.splitlines() if line.strip().startswith(f"{version}.")]
    if not matching:
        return None
    newest = max(matching, key=lambda name: [int(piece) for piece in name.split(".") if piece.isdigit()])
    prefix = subprocess.run(["pyenv", "prefix", newest], capture_output=True, text=True, check=False).stdout.strip()
    return str(Path(prefix) / "bin" / "python") if prefix else None


def runs(python: str, version: str) -> bool:
    """Whether an interpreter starts and is of this version (pyenv's shims exist for versions that do not)."""
    return python_version(python) == version


def python_version(python: str) -> str:
    """Major and minor version of an interpreter."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()


def installed_lane() -> str | None:
    """The lane of the environment that nox itself runs in."""
    try:
        version = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return None
    return version if version in LANES else None


def apart() -> dict[str, str]:
    """Lanes that have an environment of their own, each with an interpreter for it."""
    here = installed_lane()
    found = {version: interpreter(pythons) for version, pythons in LANES.items() if version != here}
    return {version: python for version, python in found.items() if python is not None}


def own_python(version: str) -> str:
    """The interpreter of a lane's own environment."""
    return str(Path(".nox").absolute() / f"lane-{version.replace('.', '-')}" / "bin" / "python")


def others_packages(version: str, python: str) -> list[tuple[str, ...]]:
    """Commands that make a lane's environment, and install all of it but this project."""
    own = own_python(version)
    pip = (own, "-m", "pip", "install", "--quiet", "--constraint", "constraints.txt")
    venv = [] if Path(own).with_name("pip").exists() else [(python, "-m", "venv", str(Path(own).parents[1]))]
    return [*venv, (*pip, "torch"), (*pip, f"megatron-core=={version}", *LANE_PACKAGES, *LANE_EXTRAS.get(version, ()))]


def make_environments(lanes: dict[str, str]) -> None:
    """Make environments until something fails, in silence: each lane repeats its commands, and shows what they say.

    This project is left out, because building it writes into the checkout, where tests run meanwhile.
    """
    for version, python in lanes.items():
        for command in others_packages(version, python):
            # nice: tests that run meanwhile come first
            if subprocess.run(("nice", *command), capture_output=True, check=False).returncode:
                return


def tool(name: str) -> str:
    """A command of the environment that nox runs in."""
    return str(Path(sys.executable).parent / name)


@nox.session(venv_backend="none")
def environments(session: nox.Session) -> None:
    """Begin to make the lanes' environments, one after another; lanes wait for the last one."""
    MAKERS.append(threading.Thread(target=make_environments, args=(apart(),)))
    MAKERS[-1].start()


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Format, lint, types, import rule."""
    session.run(tool("ruff"), "format", "--check", ".")
    session.run(tool("ruff"), "check", ".")
    session.run(tool("mypy"))
    session.run(tool("lint-imports"), "--cache-dir", ".import_linter_cache")
    RESULTS.append("lint: passed")


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """All tests but the lanes'."""
    session.run(
        sys.executable, "-m", "pytest", "-m", "not lane and not gpu and not npu", *MAIN_IN_PARALLEL, *session.posargs
    )
    RESULTS.append("tests: passed")


def lane_in_place(session: nox.Session) -> None:
    """The lane tests in the environment that nox runs in."""
    version = installed_lane()
    if version is None:
        session.skip("the main environment has no megatron-core of a tested version")
    session.run(sys.executable, "-m", "pytest", LANE_TESTS, "-m", "lane", *IN_PARALLEL, *session.posargs)
    RESULTS.append(f"lane megatron-core {version} on Python {sys.version_info.major}.{sys.version_info.minor}: passed")


def lane_apart(session: nox.Session, version: str, python: str) -> None:
    """The lane tests in an environment of their own."""
    for maker in MAKERS:
        maker.join()
    for command in others_packages(version, python):
        session.run(*command)
    own = own_python(version)
    session.run(own, "-m", "pip", "install", "--quiet", "--constraint", "constraints.txt", "--editable", ".")
    session.run(own, "-m", "pytest", LANE_TESTS, "-m", "lane and not once", *IN_PARALLEL, *session.posargs)
    RESULTS.append(f"lane megatron-core {version} on Python {python_version(own)}: passed")


def register_lanes() -> None:
    """One session per lane, named after its version; first the one that needs no environment of its own."""
    here, interpreters = installed_lane(), apart()
    for version, pythons in sorted(LANES.items(), key=lambda lane: lane[0] != here):
        name = f"lane-{version}"
        if version == here:
            nox.session(venv_backend="none", name=name)(lambda session: lane_in_place(session))
            continue
        if version not in interpreters:
            reason = f"lane megatron-core {version}: not run, no Python {' or '.join(pythons)} found"
            RESULTS.append(reason)
            continue

        def run(session: nox.Session, version: str = version) -> None:
            lane_apart(session, version, interpreters[version])

        nox.session(venv_backend="none", name=name)(run)


register_lanes()


@nox.session(venv_backend="none")
def summary(session: nox.Session) -> None:
    """Say which lanes ran."""
    session.log("what ran:")
    for line in RESULTS:
        session.log(f"  {line}")
