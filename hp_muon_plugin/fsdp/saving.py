"""Where torch's distributed checkpoint would keep one rank's shards for the whole model.

It takes plain tensors of one name for copies, of which one rank's is written. Shards are looked for before anything is
saved or copied to be saved in the background, and, as what lies elsewhere, in what is about to be written.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NoReturn

from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.fsdp.parts import Places, copied_part
from hp_muon_plugin.platform.patching import Replacement

_FIX = (
    "save hp_muon_plugin.fsdp.whole.full_state_dict(model), or each rank's state_dict() in a file of its own with "
    "torch.save"
)


def saving_guards() -> tuple[Replacement, ...]:
    """What to replace in ``torch.distributed.checkpoint``."""
    # half a second, which no other part of this package needs
    from torch.distributed.checkpoint import default_planner, state_dict, state_dict_saver

    return (
        Replacement(
            state_dict_saver,
            "_stateful_to_state_dict",
            _collecting,
            "save and async_save go on with what it returns; async_save copies it first",
        ),
        Replacement(
            default_planner,
            "create_default_local_save_plan",
            _planning,
            "plain tensors of one name count as copies, of which one rank's is written",
        ),
        Replacement(
            state_dict,
            "_maybe_full_or_cpu_state_dict",
            _gathering,
            "full_state_dict=True leaves plain tensors as they are",
        ),
    )


def _collecting(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def checked(state_dict: Any) -> Any:
        found = original(state_dict)
        _refuse_places(found)
        return found

    return checked


def _planning(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def checked(state_dict: dict[str, Any], is_coordinator: bool) -> Any:
        _refuse_places(state_dict)
        copied = copied_part(state_dict)
        if copied is not None:
            _refuse(copied)
        return original(state_dict, is_coordinator)

    return checked


def _gathering(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def checked(state_dict: dict[str, Any], info: Any) -> Any:
        if info.full_state_dict:
            name = _held(state_dict, Places.now())
            if name is not None:
                raise ConfigError(
                    "torch.distributed.checkpoint.state_dict",
                    name,
                    "is this rank's shard, and full_state_dict=True takes it for the whole",
                    "hp_muon_plugin.fsdp.whole.full_state_dict(model)",
                )
        return original(state_dict, info)

    return checked


def _refuse_places(state_dict: Mapping[str, Any]) -> None:
    name = _held(state_dict, Places.now())
    if name is not None:
        _refuse(name)


def _held(value: Any, places: Places, name: str = "") -> str | None:
    """The name of the first value in nested ones that lies where shards do."""
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(str(number), item) for number, item in enumerate(value)]
    else:
        return name if places.has(value) else None
    found = (_held(item, places, f"{name}.{key}" if name else key) for key, item in items)
    return next((held for held in found if held is not None), None)


def _refuse(name: str) -> NoReturn:
    raise ConfigError(
        "torch.distributed.checkpoint",
        name,
        "is this rank's shard, and torch takes plain tensors of one name for copies: it would keep one rank's and lose "
        "the others",
        _FIX,
    )
