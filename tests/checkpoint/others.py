"""Fixtures of the formats other than torch_dist, checked against what was read off the live objects."""

import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hp_muon_plugin.checkpoint.canonical import Key, Kind, Source, Target
from hp_muon_plugin.checkpoint.formats import check_choices, open_checkpoint, writer
from tests.checkpoint.fixtures import DATA, SHARED, differences, digest, truth

CARRIED = tuple(sorted(path.name.removesuffix(".tar.xz") for path in (DATA / "others").glob("*.tar.xz")))
BUDGET = 2**26
_STACK = re.compile(r"\.experts\.linear_fc")


def fixtures(family: str, carried: str | None = None) -> list[str]:
    """Names of a family's fixtures, as ``torch_fsdp2/dense_flat_ws2``; the carried one where none are shared."""
    found = sorted(f"{path.parent.name}/{path.name}" for path in SHARED.glob(family) if path.is_dir())
    return found or ([carried] if carried else [])


def fixture(name: str, folder: Path) -> Path:
    """Folder of a fixture; a copy that may be harmed if it is carried."""
    packed = name.replace("/", "_")
    if packed in CARRIED:
        with tarfile.open(DATA / "others" / f"{packed}.tar.xz") as archive:
            archive.extractall(folder / packed, filter="data")
        return folder / packed
    return SHARED / name


def wrong(source: Source, folder: Path, *, weights_are_masters: bool = False) -> list[str]:
    """What of a source is not as the truth has it: tensors, step counts, values of groups."""
    expected, body = truth(folder)
    found = []
    seen: set[Key] = set()
    for key, value in expected.items():
        kind = Kind.main if weights_are_masters and key.kind == Kind.weight else key.kind
        keys = [Key(name, kind) for name in singles(key.name, source)]
        seen.update(keys)
        if any(item not in source.tensors() for item in keys):
            found.append(f"{key} is missing")
            continue
        tensors = [source.read(item) for item in keys]
        if digest(torch.stack(tensors) if _STACK.search(key.name) else tensors[0]) != value:
            found.append(f"{key} differs")
    left = set(source.tensors()) - seen
    found += [f"{key} is too much" for key in left if not (weights_are_masters and key.kind == Kind.weight)]
    state = source.state()
    for name, step in body["optimizer_step_of"].items():
        found += [f"step of {one}" for one in singles(name, source) if state.steps.get(one) != step]
    for name, values in body["param_group_of"].items():
        for one in singles(name, source):
            own = state.hyper[one]
            found += [f"{key} of {one}" for key, value in values.items() if key in own and as_json(own[key]) != value]
    return found


def singles(name: str, source: Source) -> list[str]:
    """Names of single experts for that of a stack."""
    if not _STACK.search(name):
        return [name]
    count = source.state().model["num_experts"]
    return [name.replace(".experts.", f".experts.local_experts.{index}.") for index in range(count)]


def as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def written(source: Source, to: str, folder: Path, target: Target | None = None) -> Source:
    """A source in another format, opened again."""
    folder.mkdir(parents=True)
    counted: list[int] = []
    target = target or Target()
    check_choices(to, (), target.options)
    chosen = writer(to)
    chosen.losses(source, target)
    chosen.write(source, folder, target, counted.append, BUDGET)
    assert sum(counted) > 0
    return open_checkpoint(folder, to)


def there_and_back(
    source: Source,
    via: str,
    folder: Path,
    *,
    there: Target | None = None,
    back: Target | None = None,
    also: Callable[[Source], None] | None = None,
) -> list[str]:
    """What differs after a conversion to another format and back."""
    other = written(source, via, folder / "there", there)
    if also:
        also(other)
    again = written(other, source.format, folder / "back", back)
    found = differences(source, again)
    for what in ("iteration", "steps", "scheduler", "momentum", "vocab_size", "consumed_samples"):
        if getattr(again.state(), what) != getattr(source.state(), what):
            found.append(what)
    other.close()
    again.close()
    return found
