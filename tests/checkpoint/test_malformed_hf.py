"""Hugging Face folders with fields of other types, or without: one message with the file and the field."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hp_muon_plugin.checkpoint.canonical import Target
from hp_muon_plugin.checkpoint.formats import open_checkpoint
from hp_muon_plugin.checkpoint.formats.hf import _ARGS
from hp_muon_plugin.cli.ckpt import run
from hp_muon_plugin.errors import CheckpointError, DamageError
from tests.checkpoint.others import fixture, written

GONE = object()
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    source = open_checkpoint(fixture("megatron_fsdp019/moehet_ep2_dp2", folder) / "ckpt")
    written(source, "hf", folder / "hf", Target(shard_bytes=20_000)).close()
    return folder / "hf"


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    (tmp_path / "hf").mkdir()
    for path in whole.iterdir():
        if path.name.endswith(".json"):
            (tmp_path / "hf" / path.name).write_bytes(path.read_bytes())
        else:
            (tmp_path / "hf" / path.name).symlink_to(path)
    return tmp_path / "hf"


def changed(path: Path, change: dict[str, Any]) -> None:
    value = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not GONE}))


@pytest.mark.parametrize("field", sorted(_ARGS))
def test_each_number_of_the_configuration_is_one(field: str, folder: Path) -> None:
    """``"x"`` ended in a traceback, or went on into Megatron's arguments."""
    kept = (folder / "config.json").read_bytes()
    for value in ("x", [1], {}, True, -1, *([] if field in ("rms_norm_eps", "rope_theta") else [2.5])):
        changed(folder / "config.json", {field: value})
        with pytest.raises(DamageError, match=rf"config\.json: {field} is .*\n  fix: "):
            open_checkpoint(folder)
        (folder / "config.json").write_bytes(kept)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": GONE}, "num_hidden_layers is not there"),
        ({"num_hidden_layers": None}, "num_hidden_layers is not there"),
        ({"num_attention_heads": GONE}, "num_attention_heads is not there"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, which is too small"),
        ({"head_dim": GONE, "hidden_size": GONE}, "hidden_size is not there"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide num_attention_heads, 4"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', neither true nor false"),
    ],
)
def test_fields_that_are_needed(change: dict[str, Any], message: str, folder: Path) -> None:
    changed(folder / "config.json", change)
    with pytest.raises(DamageError, match=rf"config\.json: {message}"):
        open_checkpoint(folder)
    assert run(["verify", str(folder)]) == 3


def test_a_configuration_without_a_known_type_is_none(folder: Path) -> None:
    for value in (GONE, 5, ["qwen3"]):
        changed(folder / "config.json", {"model_type": value})
        with pytest.raises(CheckpointError, match=r"config\.json names the model type .*known are"):
            open_checkpoint(folder)
    for text in ("[]", "5", "{", "", "[" * 100_000):
        (folder / "config.json").write_text(text)
        with pytest.raises(DamageError, match=r"config\.json (is damaged|holds no object)"):
            open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(DamageError, match=r"config\.json"):
        open_checkpoint(folder)


@pytest.mark.parametrize("value", [5, None, ["a"], {}, True, 1.5])
def test_the_index_names_files(value: Any, folder: Path) -> None:
    """A number was a TypeError."""
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    name = next(iter(places))
    changed(folder / INDEX, {"weight_map": {**places, name: value}})
    with pytest.raises(DamageError, match=rf"{INDEX}: weight_map names .* for {name}, not a file"):
        open_checkpoint(folder)
    changed(folder / INDEX, {"weight_map": value})
    if not isinstance(value, dict):
        with pytest.raises(DamageError, match=f"{INDEX} has no weight_map"):
            open_checkpoint(folder)


@pytest.mark.parametrize("file", ["../evil.safetensors", "/etc/passwd", "a/../../b", "C:\\b", "", "b\0"])
def test_the_index_stays_in_the_folder(file: str, folder: Path) -> None:
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    changed(folder / INDEX, {"weight_map": {**places, next(iter(places)): file}})
    with pytest.raises(CheckpointError, match="which is not inside the folder"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [-2, -3], "data_offsets": [0, 24]},
        {"dtype": "F32", "shape": [2.5], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0.0, 8.0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0]},
        {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]},
        {"shape": [2], "data_offsets": [0, 8]},
        5,
    ],
)
def test_headers_with_other_values_are_damaged(entry: Any, folder: Path) -> None:
    header = json.dumps({"model.norm.weight": entry}).encode()
    for path in folder.glob("*.safetensors"):
        path.unlink()
    (folder / INDEX).unlink()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(DamageError, match=r"model\.safetensors is damaged"):
        open_checkpoint(folder)


@pytest.mark.parametrize("other", [torch.zeros(()), torch.zeros(16, 31), torch.zeros(16, 32, dtype=torch.float64)])
def test_parts_that_do_not_fit_each_other_are_named(other: torch.Tensor, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    name = "model.layers.0.self_attn.k_proj.weight"
    file = folder / json.loads((folder / INDEX).read_text())["weight_map"][name]
    stored = load_file(file)
    file.unlink()
    save_file({**stored, name: other}, file)
    with pytest.raises(
        DamageError, match=r"k_proj\.weight is .*which does not fit model\.layers\.0\.self_attn\.q_proj"
    ):
        open_checkpoint(folder)
