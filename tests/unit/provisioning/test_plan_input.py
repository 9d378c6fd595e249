"""Reading of a model's directory: errors in one line; weights are trusted if present."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from app.provisioning.sizing.config_file import MAX_HEADER_BYTES, MAX_JSON_BYTES, read_config
from app.provisioning.sizing.facts import ModelFacts, PlanError
from app.provisioning.sizing.fit import plan
from app.provisioning.sizing.weights import weight_bytes
from tests.conftest import ROOT
from tests.plan_configs import KNOWN

LLAMA = KNOWN["meta-llama/Meta-Llama-3-8B"].config
MIXTRAL = KNOWN["mistralai/Mixtral-8x7B-v0.1"].config
# 204 parameters.
TINY = {
    "model_type": "llama", "vocab_size": 10, "hidden_size": 4, "intermediate_size": 4,
    "num_hidden_layers": 1, "num_attention_heads": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK = KNOWN["deepseek-ai/DeepSeek-V3"].config


def write(directory: Path, config: object) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def refusal(path: Path) -> str:
    with pytest.raises(PlanError) as refused:
        read_config(path)
    text = str(refused.value)
    assert "\n" not in text
    assert len(text) < 600 + len(str(path))
    return text


def safetensors(file: Path, tensors: dict[str, Any], length: int | None = None) -> None:
    header = json.dumps(tensors).encode()
    size = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    prefix = struct.pack("<Q", len(header) if length is None else length)
    file.write_bytes(prefix + header + bytes(size))


# --- Files -------------------------------------------------------------------------------------------


def test_a_directory_or_its_file(tmp_path: Path) -> None:
    write(tmp_path, LLAMA)
    assert read_config(tmp_path) == read_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON"),
        (b'{"model_type": "llama",', "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b'{"hidden_size": 1e999999}', "is not valid JSON"),
        (b"[" * 1_000_000, "is not valid JSON"),
        (b'{"a":' * 100_000, "is not valid JSON"),
        (b"[]", "the document: must be an object, not a list"),
        (b'["llama"]', "the document: must be an object, not a list"),
        (b"null", "the document: must be an object, not None"),
        (b'"' + b"x" * 1000 + b'"', "the document: must be an object, not 'xxx"),
        (b"{}", "num_hidden_layers: missing (or n_layer, num_layers, n_layers)"),
        (b" " * (MAX_JSON_BYTES + 1), "is larger than 16 MiB"),
    ],
)  # fmt: skip
def test_what_is_no_config(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert refusal(tmp_path).startswith(f"{tmp_path}/config.json: {message}")


def test_what_is_no_file(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path}/config.json: there is no such file"
    (tmp_path / "config.json").mkdir()
    assert refusal(tmp_path).endswith("config.json: is not a file")
    os.mkfifo(tmp_path / "pipe")
    assert refusal(tmp_path / "pipe").endswith("pipe: is not a file")
    assert refusal(Path("/dev/null")) == "/dev/null: is not a file"
    assert refusal(Path("a\0b")).endswith("there is no such file")
    assert refusal(Path("x" * 5000)).endswith("cannot be read: File name too long")


def test_a_hugging_face_id_is_to_be_downloaded_first() -> None:
    assert refusal(Path("org/model-1.5")) == (
        "org/model-1.5: there is no such file; of a Hugging Face model download its config.json "
        "first: hf download org/model-1.5 config.json"
    )
    assert refusal(Path("org/config.json")) == "org/config.json: there is no such file"
    assert refusal(Path("/org/model")) == "/org/model: there is no such file"


def entry(path: Path, model: str) -> Path:
    """A model of a Triton repository whose newest version, 10, names `model`."""
    for version in ("2", "10"):
        (path / version).mkdir(parents=True)
    (path / "2" / "config.json").write_text("{}")
    (path / "10" / "model.json").write_text(json.dumps({"model": model}))
    return path


def test_a_model_of_triton_is_its_newest_version() -> None:
    demo = ROOT / "models" / "demo"
    assert read_config(demo) == read_config(demo / "1")


@pytest.mark.parametrize("model", ["{}/llama", "models/mine/10/weights"])
def test_a_model_of_triton_may_name_another_directory(tmp_path: Path, model: str) -> None:
    """A path, or one that begins above the repository, as the service itself writes it."""
    llama = tmp_path / "llama"
    llama.mkdir()
    write(llama, LLAMA)
    mine = entry(tmp_path / "models" / "mine", model.format(tmp_path))
    (mine / "10" / "weights").symlink_to(llama)
    assert read_config(mine) == read_config(mine / "10") == read_config(llama)


def test_a_model_of_triton_may_name_what_is_not_here(tmp_path: Path) -> None:
    assert refusal(entry(tmp_path / "a", "org/model")).startswith("org/model: there is no such")
    assert refusal(entry(tmp_path / "b", "")).endswith("b/10/model.json: model: missing")
    (tmp_path / "a" / "10" / "model.json").write_text("[]")
    assert refusal(tmp_path / "a").endswith(
        "10/model.json: the document: must be an object, not a list"
    )
    (tmp_path / "a" / "10" / "model.json").write_text("{")
    broken = tmp_path / "a" / "10" / "model.json"
    assert refusal(tmp_path / "a").startswith(f"{broken}: is not valid JSON")
    broken.unlink()
    assert refusal(tmp_path / "a").endswith("a/10/config.json: there is no such file")


# --- Members -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers: missing (or n_layer, "),
        ({"hidden_size": None}, "hidden_size: missing (or n_embd, d_model, n_embed)"),
        ({"num_attention_heads": None}, "num_attention_heads: missing"),
        ({"intermediate_size": None}, "intermediate_size: missing"),
        ({"vocab_size": None}, "vocab_size: missing"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: must be from 1 to 4096, not 1000000000"),
        ({"num_hidden_layers": 10**18}, "num_hidden_layers: must be from 1 to 4096, not 1000000"),
        ({"num_hidden_layers": -1}, "num_hidden_layers: must be from 1 to 4096, not -1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: must be from 1 to 4096, not 0"),
        ({"num_hidden_layers": 32.0}, "num_hidden_layers: must be a whole number, not 32.0"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers: must be a whole number, not '32'"),
        ({"num_hidden_layers": True}, "num_hidden_layers: must be a whole number, not True"),
        ({"num_hidden_layers": [1]}, "num_hidden_layers: must be a whole number, not a list"),
        ({"hidden_size": 10**12}, "hidden_size: must be from 1 to 16777216, not 1000000000000"),
        ({"hidden_size": {}}, "hidden_size: must be a whole number, not an object"),
        ({"hidden_size": 4097}, "head_dim: missing, and 32 attention heads do not divide the hid"),
        ({"num_key_value_heads": 5}, "num_key_value_heads: 5 does not divide the 32 attention heads"),
        ({"num_key_value_heads": 64}, "num_key_value_heads: 64 does not divide the 32 attention"),
        ({"head_dim": -128}, "head_dim: must be from 1 to 16777216, not -128"),
        ({"vocab_size": -5}, "vocab_size: must be from 1 to 16777216, not -5"),
        ({"max_position_embeddings": -1}, "max_position_embeddings: must be from 1 to 2147483648"),
        ({"sliding_window": -1}, "sliding_window: must be from 0 to 2147483648, not -1"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: must be true or false, not 'no'"),
        ({"attention_bias": 1}, "attention_bias: must be true or false, not 1"),
        ({"model_type": 5}, "model_type: must be a short text, not 5"),
        ({"model_type": "x" * 10**6}, "model_type: must be a short text, not 'xxxx"),
        ({"torch_dtype": ["bfloat16"]}, "torch_dtype: must be a short text, not a list"),
        ({"layer_types": "full_attention"}, "layer_types: must be a list of 32 texts"),
        ({"layer_types": ["full_attention"] * 31}, "layer_types: must be a list of 32 texts"),
        ({"layer_types": [None] * 32}, "layer_types: must be a list of texts"),
        ({"layer_types": ["mamba"] * 32}, "layer_types: no layer keeps keys and values"),
        ({"text_config": [1]}, "text_config: must be an object, not a list"),
        ({"text_config": {"model_type": "llama", "hidden_size": -1}}, "text_config.hidden_size: "),
        ({"quantization_config": []}, "quantization_config: must be an object, not a list"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config.bits: missing",
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 10**9}},
            "quantization_config.bits: must be from 1 to 16, not 1000000000",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            "quantization_config.weight_block_size: must be two numbers above 0",
        ),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": [1]}},
            "quantization_config.config_groups: must be an object, not a list",
        ),
    ],
)  # fmt: skip
def test_a_wrong_member_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    text = refusal(write(tmp_path, LLAMA | change))
    assert text.startswith(f"{tmp_path}/config.json: {message}")


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (MIXTRAL, {"num_local_experts": 10**9}, "num_local_experts: must be from 0 to 65536"),
        (MIXTRAL, {"num_local_experts": -8}, "num_local_experts: must be from 0 to 65536, not -8"),
        (MIXTRAL, {"num_experts_per_tok": None}, "num_experts_per_tok: missing (or experts_per_"),
        (MIXTRAL, {"mlp_only_layers": [10**9]}, "mlp_only_layers: must be a list of numbers from"),
        (MIXTRAL, {"mlp_only_layers": [0] * 5000}, "mlp_only_layers: must be a list of at most"),
        (DEEPSEEK, {"kv_lora_rank": -1}, "kv_lora_rank: must be from 1 to 16777216, not -1"),
        (DEEPSEEK, {"qk_rope_head_dim": None}, "qk_rope_head_dim: missing"),
        (DEEPSEEK, {"moe_layer_freq": 0}, "moe_layer_freq: must be from 1 to 4096, not 0"),
    ],
)
def test_a_wrong_member_of_experts_and_latent_attention_is_named(
    tmp_path: Path, config: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    assert message in refusal(write(tmp_path, config | change))


def test_the_largest_numbers_are_calculated_with(tmp_path: Path) -> None:
    """Nothing is allocated or looped over by these: some 10^22 parameters fit nowhere."""
    huge = {
        "model_type": "llama", "num_hidden_layers": 4096, "hidden_size": 1 << 24,
        "num_attention_heads": 1 << 16, "intermediate_size": 1 << 24, "vocab_size": 1 << 24,
        "num_local_experts": 1 << 16, "num_experts_per_tok": 1, "head_dim": 1 << 24,
        "max_position_embeddings": 1 << 31, "sliding_window": 1 << 31,
    }  # fmt: skip
    facts = read_config(write(tmp_path, huge))
    assert facts.parameters > 10**22
    assert not any(one.fits for one in plan(facts, context=1 << 31))


# --- Weights that are there ---------------------------------------------------------------------------


def test_the_index_is_believed(tmp_path: Path) -> None:
    write(tmp_path, LLAMA)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 16_060_522_496}, "weight_map": {}}))
    facts = read_config(tmp_path)
    assert facts.stored_bytes == weight_bytes(facts, "bfloat16") == 2 * facts.parameters
    assert weight_bytes(facts, "float32") == 4 * facts.parameters
    assert "Weights on disk are 16,060,522,496 bytes" in facts.notes[-1]
    # A file by itself does not describe its directory.
    assert read_config(tmp_path / "config.json").stored_bytes is None


def test_a_quantized_checkpoint_has_its_size_in_every_precision(tmp_path: Path) -> None:
    write(tmp_path, DEEPSEEK)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 688_586_727_753}}))
    facts = read_config(tmp_path)
    assert weight_bytes(facts, "bfloat16") == weight_bytes(facts, "float16") == 688_586_727_753


def test_headers_are_believed_where_there_is_no_index(tmp_path: Path) -> None:
    write(tmp_path, TINY)
    safetensors(
        tmp_path / "model.safetensors",
        {
            "a": {"dtype": "F32", "shape": [25], "data_offsets": [0, 100]},
            "b": {"dtype": "F32", "shape": [250], "data_offsets": [100, 1100]},
        },
    )
    safetensors(
        tmp_path / "consolidated.safetensors",
        {"a": {"dtype": "F32", "shape": [25], "data_offsets": [0, 100]}},
    )
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    facts = read_config(tmp_path)
    assert facts.stored_bytes == 1100
    assert weight_bytes(facts, "bfloat16") == 550


def test_several_files_are_added_up(tmp_path: Path) -> None:
    write(tmp_path, TINY)
    os.mkfifo(tmp_path / "pipe.safetensors")  # nothing ever comes out of it
    for number in range(3):
        safetensors(
            tmp_path / f"part-{number}.safetensors",
            {"a": {"dtype": "I8", "shape": [90], "data_offsets": [0, 90]}},
        )
    facts = read_config(tmp_path)
    assert facts.stored_bytes == weight_bytes(facts, "float32") == 270
    assert facts.stored_dtype is None


def index_of(directory: Path, total: int) -> ModelFacts:
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": total}}))
    return read_config(directory)


@pytest.mark.parametrize(
    ("change", "least", "most"),
    [
        ({}, 8_030_261_248, 24_090_783_744),
        # Compressed: from half of that to all that it is without.
        ({"quantization_config": {"quant_method": "fp8"}}, 4_540_600_000, 24_090_783_744),
        # A first guess is not held to much.
        ({"model_type": "novel"}, 2_007_565_312, 1 << 49),
        ({"quantization_config": {"quant_method": "novel"}}, 2_007_565_312, 1 << 49),
    ],
)
def test_a_size_that_cannot_be_right_is_not_believed(
    tmp_path: Path, change: dict[str, Any], least: int, most: int
) -> None:
    write(tmp_path, LLAMA | change)
    formula = read_config(tmp_path / "config.json")
    for total in (least + 100_000, most - 1):
        assert index_of(tmp_path, total).stored_bytes == total
    for total in (1000, least - 100_000, *([most + 2] if most < 1 << 49 else [])):
        facts = index_of(tmp_path, total)
        assert weight_bytes(facts, "bfloat16") == weight_bytes(formula, "bfloat16")
        assert f" {total:,} bytes (from model.safetensors.index.json), which" in facts.notes[-1]
        assert "Is the download whole?" in facts.notes[-1]


def test_a_multimodal_model_may_have_more_than_is_counted(tmp_path: Path) -> None:
    write(tmp_path, {"model_type": "seer", "text_config": LLAMA})
    assert index_of(tmp_path, 40_000_000_000).stored_bytes == 40_000_000_000


@pytest.mark.parametrize("there", [1, 2])
def test_numbered_files_are_believed_only_together(tmp_path: Path, there: int) -> None:
    write(tmp_path, TINY)
    for number in range(1, there + 1):
        safetensors(
            tmp_path / f"model-0000{number}-of-00002.safetensors",
            {"a": {"dtype": "BF16", "shape": [100], "data_offsets": [0, 200]}},
        )
    facts = read_config(tmp_path)
    assert weight_bytes(facts, "bfloat16") == (400 if there == 2 else 408)
    missing = (
        "Only 1 of 2 files *-of-00002.safetensors are here: the formula is taken for the weights."
    )
    assert (facts.notes[-1] == missing) == (there == 1)


def test_the_demo_model_is_what_it_weighs() -> None:
    directory = ROOT / "models" / "demo" / "1"
    facts = read_config(directory)
    tensors = (directory / "model.safetensors").stat().st_size
    assert facts.stored_bytes
    assert 0 < tensors - facts.stored_bytes < 100_000  # the header
    assert facts.stored_bytes == 2 * facts.parameters


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"metadata": {"total_size": -1}}', "metadata.total_size: must be from 1 to"),
        ('{"metadata": {"total_size": 1e300}}', "metadata.total_size: must be from 1 to"),
        ('{"metadata": {"total_size": "7"}}', "metadata.total_size: must be a whole number"),
        ('{"metadata": 7}', "metadata: must be an object, not 7"),
        ("[]", "the document: must be an object, not a list"),
        ("{", "is not valid JSON"),
    ],
)
def test_a_wrong_index_is_named(tmp_path: Path, content: str, message: str) -> None:
    index = write(tmp_path, LLAMA) / "model.safetensors.index.json"
    index.write_text(content)
    assert refusal(tmp_path).startswith(f"{index}: {message}")


@pytest.mark.parametrize(
    ("tensor", "length", "message"),
    [
        ({"dtype": "F16", "data_offsets": [0, 10]}, 1 << 60, "its header is too long"),
        ({"dtype": "F16", "data_offsets": [0, 10]}, MAX_HEADER_BYTES + 1, "its header is too long"),
        ({"dtype": "F16", "data_offsets": [0, 10]}, 5, "its header is not JSON"),
        ({"dtype": "F16", "data_offsets": [10, 0]}, None, "tensor 'a' is not inside the file"),
        ({"dtype": "F16", "data_offsets": [-1, 0]}, None, "tensor 'a' is not inside the file"),
        ({"dtype": "F16", "data_offsets": [0.5, 1]}, None, "tensor 'a' is not inside the file"),
        ({"dtype": "F16", "data_offsets": [0, 0]}, None, "holds no tensors"),
        ({"data_offsets": [0, 10]}, None, "tensor 'a' has no type or place"),
        ({"dtype": "F16", "data_offsets": [0, 1, 2]}, None, "tensor 'a' has no type or place"),
    ],
)
def test_a_wrong_header_is_named(
    tmp_path: Path, tensor: dict[str, Any], length: int | None, message: str
) -> None:
    file = write(tmp_path, LLAMA) / "model.safetensors"
    safetensors(file, {"a": {"data_offsets": [0, 20]} | tensor}, length)
    text = refusal(tmp_path)
    assert text.startswith(f"{file}: ")
    assert message in text


def test_tensors_beyond_the_file_are_not_believed(tmp_path: Path) -> None:
    file = write(tmp_path, LLAMA) / "model.safetensors"
    header = b'{"a": {"dtype": "F16", "data_offsets": [0, 99999999999999]}}'
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    assert refusal(tmp_path) == f"{file}: tensor 'a' is not inside the file"
