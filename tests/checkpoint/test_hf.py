"""Hugging Face safetensors: q, k, v by query group, gate and up, experts, vocabulary, ties, shards."""

import json
from pathlib import Path

import pytest
import torch

from hp_muon_plugin.checkpoint.canonical import Info, Key, RunState, Source, Target
from hp_muon_plugin.checkpoint.formats import open_checkpoint, writer
from hp_muon_plugin.checkpoint.formats.hf_names import FAMILIES, canonical_of, fused
from hp_muon_plugin.checkpoint.formats.torch_dist_buffers_write import buffers_plan
from hp_muon_plugin.errors import CheckpointError, ConfigError
from tests.checkpoint.fixtures import MadeUp
from tests.checkpoint.others import fixture, fixtures, written

HET = "megatron_fsdp019/moehet_ep2_dp2"
ALL = [*fixtures("megatron_fsdp019/*", HET), *fixtures("torch_fsdp2/*", "torch_fsdp2/moe_stacked_ws2")]


def unequal(source: Source, other: Source, rows: int) -> list[str]:
    """Weights and buffers that are not the same, of the vocabulary the true rows."""
    found = []
    for key in source.tensors():
        if key.kind in ("weight", "buffer"):
            expected, there = source.read(key), other.read(key) if key in other.tensors() else None
            if there is not None and key.name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                expected, there = expected[:rows], there[:rows]
            if there is None or not torch.equal(there, expected):
                found.append(str(key))
    return found


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shard_bytes", [2**30, 20_000])
def test_weights_go_there_and_back(name: str, shard_bytes: int, tmp_path: Path) -> None:
    source = open_checkpoint(fixture(name, tmp_path) / "ckpt")
    target = Target(shard_bytes=shard_bytes, options={"vocab_size": "125"})
    other = written(source, "hf", tmp_path / "out", target)
    assert unequal(source, other, 125) == []
    assert other.tensors()[Key("embedding.word_embeddings.weight", "weight")].shape == (125, 32)
    assert {key.name for key in other.tensors()} == {key.name for key in source.tensors()}
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    if shard_bytes < 2**30:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == {file.name for file in files}
        assert all(file.stat().st_size < 3 * shard_bytes for file in files)
    else:
        assert [file.name for file in files] == ["model.safetensors"]
    # Report 17 and Megatron-LM#4129: padded once, by the true size, for the tensor-parallel size asked for.
    padded = written(other, "torch", tmp_path / "mg", Target(tp=2, options={"make_vocab_size_divisible_by": "64"}))
    embedding = padded.read(Key("embedding.word_embeddings.weight", "weight"))
    assert embedding.shape == (128, 32)
    assert unequal(other, padded, 125) == []
    assert not embedding[125:].any()


def test_q_k_and_v_by_query_group(tmp_path: Path) -> None:
    """4 heads, 2 groups, 8 rows a head: rows of a group are two queries, one key, one value."""
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    source = open_checkpoint(fixture(HET, tmp_path) / "ckpt")
    written(source, "hf", tmp_path / "out")
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "out" / "model.safetensors")
    whole = source.read(Key(name, "weight")).view(2, 4, 8, 32)
    prefix = "model.layers.0.self_attn."
    assert torch.equal(stored[f"{prefix}q_proj.weight"].view(2, 2, 8, 32), whole[:, :2])
    assert torch.equal(stored[f"{prefix}k_proj.weight"].view(2, 8, 32), whole[:, 2])
    assert torch.equal(stored[f"{prefix}v_proj.weight"].view(2, 8, 32), whole[:, 3])


def test_what_is_lost_is_listed(tmp_path: Path) -> None:
    source = open_checkpoint(fixture(HET, tmp_path) / "ckpt")
    lines = writer("hf").losses(source, Target())
    parameters = len({key.name for key in source.tensors() if key.kind == "main"})
    assert f"float32 masters of {parameters} parameters" in lines
    assert f"exp_avg of {parameters} parameters" in lines
    assert {"iteration", "random state", "learning-rate schedule", "steps of the optimizer"} <= set(lines)


def latent_model() -> MadeUp:
    """One dense layer, one of experts, multi-latent attention, one layer of multi-token prediction."""
    attention = {
        "linear_proj.weight": (16, 24), "linear_q_down_proj.weight": (8, 16), "linear_q_up_proj.weight": (40, 8),
        "linear_kv_down_proj.weight": (10, 16), "linear_kv_up_proj.weight": (48, 6), "q_layernorm.weight": (8,),
        "kv_layernorm.weight": (6,),
    }  # fmt: skip
    norms = {"input_layernorm.weight": (16,), "pre_mlp_layernorm.weight": (16,)}
    dense = {"mlp.linear_fc1.weight": (32, 16), "mlp.linear_fc2.weight": (16, 16)}
    sparse = {
        "mlp.router.weight": (2, 16), "mlp.shared_experts.linear_fc1.weight": (16, 16),
        "mlp.shared_experts.linear_fc2.weight": (16, 8),
        **{f"mlp.experts.local_experts.{i}.linear_fc1.weight": (16, 16) for i in range(2)},
        **{f"mlp.experts.local_experts.{i}.linear_fc2.weight": (16, 8) for i in range(2)},
    }  # fmt: skip
    layer = {**norms, **{f"self_attention.{key}": shape for key, shape in attention.items()}}
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (32, 16),
        "decoder.final_layernorm.weight": (16,),
        "output_layer.weight": (32, 16),
        **{f"decoder.layers.0.{key}": shape for key, shape in {**layer, **dense}.items()},
        **{f"decoder.layers.1.{key}": shape for key, shape in {**layer, **sparse}.items()},
        **{f"mtp.layers.0.transformer_layer.{key}": shape for key, shape in {**layer, **sparse}.items()},
        "mtp.layers.0.enorm.weight": (16,), "mtp.layers.0.hnorm.weight": (16,),
        "mtp.layers.0.eh_proj.weight": (16, 32), "mtp.layers.0.final_layernorm.weight": (16,),
    }  # fmt: skip
    infos = {Key(name, "weight"): Info(shape, torch.bfloat16) for name, shape in shapes.items()}
    infos[Key("decoder.layers.1.mlp.router.expert_bias", "buffer")] = Info((2,), torch.float32)
    args = {
        "num_attention_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 6, "qk_head_dim": 12, "qk_pos_emb_head_dim": 4,
        "v_head_dim": 12,
    }  # fmt: skip
    return MadeUp(infos, RunState(args=args))


def test_latent_attention_and_multi_token_prediction(tmp_path: Path) -> None:
    source = latent_model()
    other = written(source, "hf", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "deepseek_v3"
    assert (config["first_k_dense_replace"], config["n_routed_experts"], config["num_nextn_predict_layers"]) == (
        1,
        2,
        1,
    )
    assert unequal(source, other, 32) == []
    assert other.tensors().keys() == source.tensors().keys()
    # the same through Megatron's folders, cut over two tensor- and expert-parallel ranks
    for specification in ("local", "te"):
        megatron = written(
            source, "torch", tmp_path / specification, Target(tp=2, ep=2, options={"spec": specification})
        )
        assert unequal(source, megatron, 32) == []
    stages = written(source, "torch", tmp_path / "pp", Target(pp=2, options={"prediction": "mtp_model_layer"}))
    assert unequal(source, stages, 32) == []
    tied = MadeUp(
        {key: info for key, info in source.tensors().items() if key.name != "output_layer.weight"}, source.state()
    )
    assert unequal(tied, written(tied, "torch", tmp_path / "tied", Target(pp=2)), 32) == []
    with pytest.raises(
        ConfigError, match="--pp=2: with multi-token prediction and a tied output layer .*AssertionError"
    ):
        buffers_plan(tied, Target(pp=2))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_names_are_the_same_in_both_directions(family: object) -> None:
    names = [key.name for key in latent_model().tensors()]
    names += ["decoder.layers.1.self_attention.linear_qkv.weight", "decoder.layers.1.mlp.shared_experts.gate_weight"]
    turned = 0
    for name in names:
        found = fused(name, family, 2)  # type: ignore[arg-type]
        for item in found.names if found else ():
            assert canonical_of(item, family, 2) == name  # type: ignore[arg-type]
            turned += 1
    assert turned > 30


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    written(latent_model(), "hf", tmp_path / "out")
    from safetensors.torch import load_file, save_file

    path = tmp_path / "out" / "model.safetensors"
    stored = load_file(path)
    save_file({**stored, "model.layers.0.self_attn.rotary.weight": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match=r"self_attn\.rotary\.weight has no place in a deepseek_v3 model"):
        open_checkpoint(tmp_path / "out")
    del stored["model.layers.1.mlp.experts.1.up_proj.weight"]
    save_file(stored, path)
    with pytest.raises(CheckpointError, match=r"experts\.1\.up_proj\.weight is in no file"):
        open_checkpoint(tmp_path / "out")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="does not fit the file"):
        open_checkpoint(tmp_path / "out")


def test_heads_come_from_the_configuration_of_a_run_of_ours(tmp_path: Path) -> None:
    """A checkpoint of ``hp-muon train`` was refused: "give it as an option", not said how."""
    source = open_checkpoint(fixture("megatron_fsdp019/moehet_ep2_dp2", tmp_path) / "ckpt")
    norms = ("q_layernorm", "k_layernorm")
    infos = {key: info for key, info in source.tensors().items() if not any(name in key.name for name in norms)}
    unknown = MadeUp(infos, RunState(vocab_size=125))
    with pytest.raises(ConfigError, match="--option num_attention_heads=32"):
        writer("hf").losses(unknown, Target())
    known = MadeUp(infos, RunState(vocab_size=125, other={"config": {"model": {"num_attention_heads": 4}}}))
    out = tmp_path / "out"
    out.mkdir()
    writer("hf").write(known, out, Target(), lambda nbytes: None, 2**24)
    config = json.loads((out / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)
