"""``manifest.json``: all values come back as they were, and nothing damaged or foreign is believed."""

import hashlib
import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from hp_muon_plugin.bench.made_up import gpt
from hp_muon_plugin.checkpoint.canonical import Info, Key, Momentum, RunState
from hp_muon_plugin.checkpoint.folders import MANIFEST
from hp_muon_plugin.checkpoint.formats import open_checkpoint
from hp_muon_plugin.checkpoint.manifest import (
    FileInfo,
    Manifest,
    check_files,
    hashed,
    manifest_text,
    parse_manifest,
    read_manifest,
    with_tensors,
    without_tensors,
)
from hp_muon_plugin.errors import CheckpointError
from tests.checkpoint.others import written

STATE = RunState(
    iteration=10,
    consumed_samples=320,
    scheduler={"num_steps": 10, "max_lr": 5e-3},
    hyper={"decoder.final_layernorm.weight": {"lr": 0.1 + 0.2, "betas": (0.9, 0.95), "wd_mult": 0.0}},
    steps={"decoder.final_layernorm.weight": 2.0**24 + 2},
    momentum=Momentum.average,
    args={"none": None, "nan": math.nan, "raw": b"\0\xff", 3: "int key", "$tuple": "not a tag", "huge": 10**30},
    random={"rank0": {"torch": torch.arange(16, dtype=torch.uint8), "python": (3, (1, 2), None)}},
    other={"list": [1, [2.5, "x"], {"a": torch.ones(2, dtype=torch.bfloat16)}]},
)


def _manifest(state: RunState = STATE) -> Manifest:
    plain, tensors = without_tensors(state)
    infos = {name: Info(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    infos["weight/decoder.final_layernorm.weight"] = Info((8,), torch.bfloat16)
    infos["exp_avg/decoder.final_layernorm.weight"] = Info((8,), torch.float32)
    return Manifest(plain, infos, {"__0_0.distcp": FileInfo(5, "a" * 32)})


def test_a_run_state_comes_back_as_it_was() -> None:
    manifest = parse_manifest(manifest_text(_manifest()), Path("x"))
    _, tensors = without_tensors(STATE)
    assert sorted(tensors) == ["other/list/2/a", "random/rank0/torch"]
    state = with_tensors(manifest.state, tensors.__getitem__)
    assert math.isnan(state.args.pop("nan"))
    wanted = {field.name: getattr(STATE, field.name) for field in fields(RunState)}
    wanted["args"] = {key: value for key, value in STATE.args.items() if key != "nan"}
    assert torch.equal(state.random["rank0"].pop("torch"), torch.arange(16, dtype=torch.uint8))
    assert torch.equal(state.other["list"][2].pop("a"), torch.ones(2, dtype=torch.bfloat16))
    assert state.random == {"rank0": {"python": (3, (1, 2), None)}}
    assert state.other == {"list": [1, [2.5, "x"], {}]}
    for name in ("iteration", "consumed_samples", "scheduler", "hyper", "steps", "momentum", "args"):
        assert getattr(state, name) == wanted[name], name
    assert manifest.parameters() == {
        Key("decoder.final_layernorm.weight", "weight"): Info((8,), torch.bfloat16),
        Key("decoder.final_layernorm.weight", "exp_avg"): Info((8,), torch.float32),
    }


def test_what_is_no_plain_value_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"args\.dtype is a torch\.dtype"):
        manifest_text(_manifest(RunState(args={"dtype": torch.float32})))


def test_any_changed_character_is_noticed() -> None:
    text = manifest_text(_manifest(RunState(iteration=3, scheduler={"max_lr": 0.25})))
    for place in range(0, len(text), 7):
        if text[place].isspace():
            continue
        changed = text[:place] + ("0" if text[place] != "0" else "1") + text[place + 1 :]
        with pytest.raises(CheckpointError):
            parse_manifest(changed, Path("x"))
    with pytest.raises(CheckpointError, match="damaged"):
        parse_manifest(text[: len(text) // 2], Path("x"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "is of format 'other'"),
        ({"version": 99}, "has version 99"),
        ({"files": {"../x": {"bytes": 1, "sha256": "a" * 64}}}, "file name '../x'"),
        ({"files": {"x": {"bytes": -1, "sha256": "a" * 64}}}, "-1 bytes"),
        ({"files": {"x": {"bytes": 1, "xxh3_128": "a" * 64}}}, "digest 'aaa"),
        ({"files": {"x": {"bytes": 1, "md5": "a" * 32}}}, "damaged"),
        ({"tensors": {"weight/x": {"shape": [2.5], "dtype": "float32"}}}, "shape"),
        ({"tensors": {"weight/x": {"shape": [2], "dtype": "os"}}}, "'os'"),
        ({"state": {"iteration": "3"}}, "state.iteration is a str"),
        ({"state": {"more": {}}}, "unknown entry more"),
        ({"state": {"args": {"$run": 1}}}, "damaged"),
    ],
)
def test_a_manifest_of_somebody_else_is_refused(change: dict[str, Any], message: str) -> None:
    from hp_muon_plugin.checkpoint.manifest import _digest

    body = json.loads(manifest_text(_manifest())) | change
    body.pop("sha256")
    with pytest.raises(CheckpointError, match=message):
        parse_manifest(json.dumps({**body, "sha256": _digest(body)}), Path("x"))


def test_missing_and_short_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no manifest.json"):
        read_manifest(tmp_path)
    data = tmp_path / "__0_0.distcp"
    data.write_bytes(b"12345")
    manifest = Manifest(RunState(), {}, {data.name: hashed(data)})
    (tmp_path / MANIFEST).write_text(manifest_text(manifest))
    check_files(tmp_path, read_manifest(tmp_path))
    data.write_bytes(b"1234")
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: has 4 bytes, 5 were written"):
        check_files(tmp_path, manifest)
    data.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        check_files(tmp_path, manifest)


def test_a_manifest_of_version_1_is_read_and_its_files_are_compared(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000
    (tmp_path / "x").write_bytes(content)
    body = json.loads(manifest_text(_manifest())) | {"version": 1}
    body["files"] = {"x": {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}
    body.pop("sha256")
    from hp_muon_plugin.checkpoint.manifest import _digest

    info = parse_manifest(json.dumps({**body, "sha256": _digest(body)}), Path("y")).files["x"]
    assert hashed(tmp_path / "x", info.algorithm) == info
    (tmp_path / "x").write_bytes(content[:-1] + b"!")
    assert hashed(tmp_path / "x", info.algorithm) != info


def test_the_hash_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    for length in (0, 1, 2**20, 2**20 + 1, 3 * 2**20 - 1):
        content = (b"hp_muon_plugin" * (length // 14 + 1))[:length]
        (tmp_path / "x").write_bytes(content)
        assert hashed(tmp_path / "x") == FileInfo(length, xxhash.xxh3_128_hexdigest(content))


@pytest.mark.parametrize("text", ["", "{", "\0\1"])
def test_a_damaged_manifest_is_not_taken_for_another_format(text: str, tmp_path: Path) -> None:
    written(gpt(1, hidden=16), "hp", tmp_path / "x").close()
    (tmp_path / "x" / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json: is damaged"):
        open_checkpoint(tmp_path / "x")
