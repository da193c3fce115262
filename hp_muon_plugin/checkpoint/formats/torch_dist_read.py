"""Reader of Megatron's ``torch_dist`` checkpoints."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hp_muon_plugin.checkpoint import torch_archive
from hp_muon_plugin.checkpoint.canonical import Info, Key, Kind, Momentum, RunState
from hp_muon_plugin.checkpoint.dcp_files import DcpFolder
from hp_muon_plugin.checkpoint.formats.spelling import LATER, PREDICTION
from hp_muon_plugin.checkpoint.formats.torch_dist_common import RECORD, apply_record
from hp_muon_plugin.checkpoint.formats.torch_dist_optimizer import candidates, is_optimizer, read_optimizer
from hp_muon_plugin.checkpoint.formats.torch_dist_parts import Part, Stacked
from hp_muon_plugin.checkpoint.megatron_groups import group_of, hyper_of
from hp_muon_plugin.checkpoint.megatron_names import expand, is_split, registration_order, style_of, weight_kind
from hp_muon_plugin.checkpoint.run_values import plain
from hp_muon_plugin.checkpoint.step_counts import note_place
from hp_muon_plugin.errors import CheckpointError, DamageError

_COMMON_OBJECT = "common_state/shard_0_1"
_EXTRA_STATE = re.compile(r"(.+)\._extra_state/shard_[\d.]+_[\d.]+\Z")
_RANDOM = re.compile(r"rng_state/shard_(\d+)\.(\d+)(?:\.(\d+))?_[\d.]+\Z")
_KIND_ORDER = [Kind.weight, Kind.buffer, Kind.main, Kind.exp_avg, Kind.exp_avg_sq, Kind.momentum]


class TorchDistSource:
    """An opened ``torch_dist`` checkpoint.

    Args:
        path: Folder of the iteration.

    Raises:
        CheckpointError: If it is damaged, or in a form that is not read.
    """

    format = "torch_dist"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = DcpFolder(path)
        self._check_backend()
        self.folder.refuse(self.folder.problems())
        self._common = self._read_common()
        self._parts: dict[Key, Part] = {}
        model = {key: tensor for key, tensor in self.folder.tensors.items() if not is_optimizer(key)}
        for key, tensor in model.items():
            if is_split(key):
                raise CheckpointError(
                    f"{path}: {key} is one half of a tensor (singleton_local_shards), which is not read"
                )
            for name, place in expand(key, tensor.shape).items():
                own = tensor.shape[len(place.index) :]
                self._parts[Key(name, weight_kind(name))] = Stacked(key, place.index, own, tensor.dtype)
        weights = {key.name: part for key, part in self._parts.items() if key.kind == Kind.weight}
        self._optimizer = read_optimizer(self.folder, self._common, weights)
        self._style = style_of(model)
        self._add_optimizer(weights)
        self._infos = {
            key: Info(self._parts[key].shape, self._parts[key].dtype) for key in sorted(self._parts, key=_order)
        }
        self._state = self._run_state()

    def tensors(self) -> Mapping[Key, Info]:
        """All logical tensors, kind by kind."""
        return self._infos

    def read(self, key: Key, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows of a tensor."""
        part = self._parts[key]
        rows = part.shape[0] if part.shape else 1
        return part.read(self.folder, start, rows if stop is None else stop)

    def state(self) -> RunState:
        """The run state."""
        return self._state

    def sources(self, key: Key) -> str:
        """Where a tensor comes from, for the plan.

        Args:
            key: Which.
        """
        part = self._parts[key]
        index = getattr(part, "index", None)
        where = f"[{', '.join(map(str, index))}]" if index else f"[{part.first}:]" if hasattr(part, "first") else ""
        return f"{part.key}{where}"

    def close(self) -> None:
        """Close files."""
        self.folder.close()

    def compare_rest(self) -> None:
        """As :meth:`~hp_muon_plugin.checkpoint.files.Files.compare_rest`."""
        self.folder.compare_rest()

    def _check_backend(self) -> None:
        raw = self.folder.files.read("metadata.json", 0, self.folder.files.size("metadata.json"))
        try:
            backend = json.loads(raw)["sharded_backend"]
        except (ValueError, KeyError, TypeError) as error:
            raise DamageError(f"{self.path / 'metadata.json'} is damaged: {error}") from error
        if backend != "torch_dist":
            raise CheckpointError(
                f"{self.path} was written by the backend {backend!r}, which is not read\n"
                "  fix: load it with the megatron-core that wrote it, and save it as torch_dist"
            )

    def _read_common(self) -> Mapping[str, Any]:
        if _COMMON_OBJECT in self.folder.objects:
            value = self.folder.object(_COMMON_OBJECT)
            value = value[0] if isinstance(value, list) and value else value
        else:
            value = torch_archive.load(self.folder.files, "common.pt", what="the common state")
        if not isinstance(value, Mapping):
            raise DamageError(f"{self.path}: its common state is no dict")
        return value

    def _add_optimizer(self, weights: Mapping[str, Part]) -> None:
        for key, part in self._optimizer.parts.items():
            weight = weights.get(key.name)
            if weight is None:
                raise DamageError(f"{self.path} has {key.kind} of {key.name}, but no such weight")
            if part.shape != weight.shape:
                raise DamageError(
                    f"{self.path}: {key.kind} of {key.name} has shape {part.shape}, the weight {weight.shape}"
                )
            if key.kind == Kind.main and weight.dtype == torch.float32:
                continue  # the optimizer's copy of a float32 weight: the same values, compared by masters()
            self._parts[key] = part

    def copies(self) -> Iterator[str]:
        """Names of float32 weights of which the optimizer keeps a copy that must be equal."""
        for key in self._optimizer.parts:
            if key.kind == Kind.main and Key(key.name, Kind.main) not in self._parts:
                yield key.name

    def read_copy(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows of such a copy.

        Args:
            name: Of the weight.
            start: First row.
            stop: One past the last.
        """
        return self._optimizer.parts[Key(name, Kind.main)].read(self.folder, start, stop)

    def _run_state(self) -> RunState:
        common, optimizer = self._common, self._optimizer
        args = plain(common["args"]) if "args" in common else {}
        hyper: dict[str, dict[str, Any]] = {}
        steps: dict[str, float] = {}
        unclear: list[str] = []
        for name in optimizer.member:
            groups = candidates(optimizer, name)
            if not groups:
                continue
            group = group_of(name, len(self._parts[Key(name, Kind.weight)].shape), groups)
            if group is None:
                unclear.append(name)
                continue
            hyper[name] = plain(hyper_of(group))
            if "step" in group and Key(name, Kind.exp_avg) in self._parts:
                steps[name] = group["step"]
        has_momentum = any(key.kind == Kind.momentum for key in self._parts)
        state = RunState(
            iteration=int(common.get("iteration", args.get("iteration") or 0)),
            consumed_samples=args.get("consumed_train_samples"),
            scheduler=plain(common.get("opt_param_scheduler") or {}),
            hyper=hyper,
            steps=steps,
            momentum=_convention(hyper) if has_momentum else None,
            vocab_size=args.get("vocab_size"),
            args=args,
            flops=common.get("num_floating_point_operations_so_far"),
            random=self._random(),
            model={
                "layers": "stacked" if self._style.stacked else "separate",
                "norms_with_linear": [
                    name
                    for name, is_fused in (
                        ("input", self._style.fused_input),
                        ("mlp", self._style.fused_mlp),
                        ("moe", self._style.fused_moe),
                        ("latent", self._style.fused_latent),
                    )
                    if is_fused
                ],
                "tied": not any(key.name == "output_layer.weight" for key in self._parts),
                "sharding": _sharding(optimizer.form, optimizer.member, has_momentum),
                "experts_apart": any(
                    group.get("is_expert_parallel") for groups in optimizer.groups.values() for group in groups
                ),
                "unclear_groups": unclear,
                **(
                    {PREDICTION: LATER} if _COMMON_OBJECT in self.folder.objects else {}
                ),  # as in the versions with that
                **({"bucket_size": optimizer.bucket_size} if optimizer.bucket_size else {}),
                "param_groups": [plain(optimizer.groups[index]) for index in sorted(optimizer.groups)],
                "modules_with_extra_state": self._extra_state_modules(),
            },
            other=self._other(),
        )
        note_place(state, optimizer.step_place)
        apply_record(state, common.get(RECORD))
        return state

    def _random(self) -> dict[str, Any]:
        found = {}
        for key in sorted(self.folder.objects):
            match = _RANDOM.match(key)
            if match:
                name = f"pp{match[1]}.tp{match[2]}" + (f".dp{match[3]}" if match[3] else "")
                states = plain(self.folder.object(key))[0]
                if len(states) == 1:
                    found[name] = {"states": states[0]}
                else:  # --data-parallel-random-init: one of every data rank
                    found.update({f"{name}.dp{rank}": {"states": item} for rank, item in enumerate(states)})
        return {name: item for name, item in found.items() if ".dp" in name or f"{name}.dp0" not in found}

    def _extra_state_modules(self) -> list[str]:
        found = (match[1] for key in self.folder.objects if (match := _EXTRA_STATE.match(key)))
        return sorted({re.sub(r"\.layers\.\d+\.", ".layers.", module) for module in found})

    def _other(self) -> dict[str, Any]:
        known = {
            RECORD,
            "args",
            "iteration",
            "optimizer",
            "opt_param_scheduler",
            "num_floating_point_operations_so_far",
        }
        return {str(key): plain(value) for key, value in self._common.items() if key not in known}


def open_source(path: Path) -> TorchDistSource:
    """Open a ``torch_dist`` checkpoint.

    Args:
        path: Folder of the iteration.
    """
    return TorchDistSource(path)


def _convention(hyper: Mapping[str, Mapping[str, Any]]) -> Momentum:
    """What the groups say; Megatron's own Muon, which says nothing, averages."""
    said = {values["momentum_convention"] for values in hyper.values() if "momentum_convention" in values}
    return Momentum.sum if said == {"sum"} else Momentum.average


def _sharding(form: str | None, member: Mapping[str, int | None], has_momentum: bool) -> str | None:
    """The form, with Muon's layer-wise ones and prefixed keys told apart."""
    has_prefix = any(index is not None for index in member.values())
    if form == "none":
        return ("layer_wise" if has_momentum else "chained") if has_prefix else form
    return f"layer_wise_{form}" if has_momentum and form is not None else form


def _order(key: Key) -> tuple[int, Any]:
    rank = _KIND_ORDER.index(Kind(key.kind)) if key.kind in _KIND_ORDER else len(_KIND_ORDER)
    return rank, registration_order(key.name)
