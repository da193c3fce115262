"""Checkpoints of any size whose tensors are made when they are read."""

from collections.abc import Mapping
from pathlib import Path

import torch

from hp_muon_plugin.checkpoint.canonical import Info, Key, Kind, RunState

_VOCABULARY = 4096
_WIDTHS = (512, 1024), (64, 256), (0, 16)


class MadeUp:
    """A source of any size: element ``i`` of a tensor is ``i mod 251``.

    Args:
        infos: Its tensors.
        state: Its run state.
    """

    format = "made-up"
    path = Path("made-up")

    def __init__(self, infos: Mapping[Key, Info], state: RunState) -> None:
        self._infos = dict(infos)
        self._state = state

    def tensors(self) -> Mapping[Key, Info]:
        """As :class:`~hp_muon_plugin.checkpoint.canonical.Source`."""
        return self._infos

    def read(self, key: Key, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """As :class:`~hp_muon_plugin.checkpoint.canonical.Source`."""
        shape = self._infos[key].shape
        stop = shape[0] if stop is None else stop
        row = torch.Size(shape[1:]).numel()
        elements = torch.arange(start * row, stop * row, dtype=torch.int32).remainder_(251)
        return elements.to(self._infos[key].dtype).view(stop - start, *shape[1:])

    def state(self) -> RunState:
        """As :class:`~hp_muon_plugin.checkpoint.canonical.Source`."""
        return self._state

    def close(self) -> None:
        """Nothing is open."""


def gpt(mib: int, hidden: int | None = None) -> MadeUp:
    """A dense model in bfloat16 with AdamW's state: float32 masters and both moments, 14 bytes a parameter.

    Args:
        mib: About how many MiB, layers being whole and one at least.
        hidden: Width; None: 1024, of small checkpoints less.
    """
    hidden = hidden or next(width for least, width in _WIDTHS if mib >= least)
    layer = {
        "input_layernorm.weight": (hidden,),
        "self_attention.linear_qkv.weight": (3 * hidden, hidden),
        "self_attention.linear_proj.weight": (hidden, hidden),
        "pre_mlp_layernorm.weight": (hidden,),
        "mlp.linear_fc1.weight": (4 * hidden, hidden),
        "mlp.linear_fc2.weight": (hidden, 4 * hidden),
    }
    shapes: dict[str, tuple[int, ...]] = {
        name: (_VOCABULARY, hidden) for name in ("embedding.word_embeddings.weight", "output_layer.weight")
    }
    shapes["decoder.final_layernorm.weight"] = (hidden,)
    room = mib * 2**20 / 14 - 2 * _VOCABULARY * hidden
    layers = max(1, round(room / (12 * hidden * hidden)))
    for index in range(layers):
        shapes |= {f"decoder.layers.{index}.{name}": shape for name, shape in layer.items()}
    infos = {Key(name, Kind.weight): Info(shape, torch.bfloat16) for name, shape in shapes.items()}
    for kind in (Kind.main, Kind.exp_avg, Kind.exp_avg_sq):
        infos |= {Key(name, kind): Info(shape, torch.float32) for name, shape in shapes.items()}
    hyper = {name: {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1} for name in shapes}
    model = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": 8}
    return MadeUp(infos, RunState(iteration=3, hyper=hyper, steps=dict.fromkeys(shapes, 3.0), model=model))
