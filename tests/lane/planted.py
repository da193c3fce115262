"""A fixture's tensors set in megatron-core's own run by hand: what conversions of it must come to."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hp_muon_plugin.checkpoint.canonical import Key, Kind, Source
from hp_muon_plugin.checkpoint.formats import open_checkpoint
from hp_muon_plugin.megatron.versions import core_version
from hp_muon_plugin.train.setup import Launch
from lane.upstream_runs import Load, Outcome, Run

_OF_GROUPS = ("lr", "betas", "eps", "weight_decay", "wd_mult", "lr_mult", "step")


def planted_and_loaded(launch: Launch, body: dict[str, Any], ckpt: Path, loads: list[Load]) -> list[list[str]]:
    """What is not the same, after loading and two steps later, between a run by hand and each that was loaded.

    Args:
        launch: This rank.
        body: Describes the run.
        ckpt: The fixture's checkpoint.
        loads: What became of it.
    """
    run = Run(launch, body)
    run.step(0)  # state is made by a step; the router's bias is float32 from a forward pass on
    _plant(run, open_checkpoint(ckpt))
    wanted = _comparable(run.trained())
    return [_unlike(wanted, _comparable(run.outcome(load))) for load in loads]


@torch.no_grad()
def _plant(run: Run, source: Source) -> None:
    steps, names = source.state().steps, {}
    for name, tensor in run.held():
        kind = Kind.weight if isinstance(tensor, torch.nn.Parameter) else Kind.buffer
        tensor.copy_(source.read(Key(name, kind)))
        names[tensor] = name
    for part in getattr(run.optimizer, "chained_optimizers", [run.optimizer]):
        for group, main, name, place in _parts(part, names):
            state, has_masters = part.optimizer.state[main], Key(name, Kind.main) in source.tensors()
            main.copy_(source.read(Key(name, Kind.main if has_masters else Kind.weight)).view(-1)[place].view_as(main))
            for kind, tensor in state.items():
                if kind == "step":
                    tensor.fill_(steps[name])
                else:
                    tensor.copy_(source.read(Key(name, kind)).view(-1)[place].view_as(tensor))
            if "step" in group:
                group["step"] = int(steps[name])
    run.schedule.num_steps = 0
    run.schedule.step(increment=source.state().scheduler["num_steps"])


def _parts(part: Any, names: dict[torch.Tensor, str]) -> Any:
    """Groups, masters, names of weights, and ranges of them, of one of Megatron's optimizers."""
    if hasattr(part, "model_param_group_index_map"):  # distributed: of a weight this rank has a range, or nothing
        for param, (group, place) in part.model_param_group_index_map.items():
            found = part._get_model_param_range_map(param)["param"]
            groups = part.optimizer.param_groups
            yield groups[group], groups[group]["params"][place], names[param], slice(found.start, found.end)
        return
    halves, masters = getattr(part, "float16_groups", []), getattr(part, "fp32_from_float16_groups", [])
    models = {
        main: param
        for some, others in zip(halves, masters, strict=True)
        for param, main in zip(some, others, strict=True)
    }
    for group in part.optimizer.param_groups:
        for main in group["params"]:
            yield group, main, names[models.get(main, main)], slice(None)


def _comparable(found: Outcome) -> Outcome:
    """Without values of groups that no other trainer has, and without random states."""
    weights, state = found.later
    return replace(found, draws={}, state=_plain(found.state), later=[weights, _plain(state)])


def _plain(state: list[Any]) -> list[Any]:
    return [
        {key: tuple(value) if isinstance(value, list) else value for key, value in item.items() if key in _OF_GROUPS}
        if isinstance(item, dict) and "lr" in item
        else item
        for item in state
    ]


def _unlike(one: Outcome, other: Outcome) -> list[str]:
    found = [name for name in ("state", "losses", "later") if getattr(one, name) != getattr(other, name)]
    return found + [name for name in one.weights if one.weights[name] != other.weights.get(name)]


def forms(body: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """What the installed version loads of a run that was not its own: format, form, whether it is distributed."""
    is_old = core_version().lane < (0, 14)
    if body["optimizer"] == "muon":
        return [("torch_dist", "none", False), ("torch", "plain", False)]
    if is_old:  # it wants fully_sharded_model_space, which we do not write
        plain = "chained" if body["ep"] > 1 else "none"
        return [("torch_dist", plain, False), ("torch", "distributed" if body["bf16"] else "plain", body["bf16"])]
    return [
        ("torch_dist", "fully_reshardable", True),
        ("torch_dist", "none", False),
        ("torch", "distributed" if body["bf16"] else "plain", body["bf16"]),
    ]
