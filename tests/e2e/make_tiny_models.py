"""Tiny random models that generate, of several architectures: a part of make_models.py.

Each gets its family's layout on disk, as if it had been downloaded: configuration, safetensors, tokenizer.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

END = "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# Begins with the token that the tokenizer adds by itself as well, and takes tools.
TOOL_TEMPLATE = (
    "{{ bos_token }}{% if tools %}Tools: {{ tools | tojson }}\n"
    "Call them as <tool_call>{...}</tool_call>\n{% endif %}" + CHAT_TEMPLATE
)
BEGIN = "<|begin|>"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
}


def make(directory: Path) -> None:
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    vocabulary = {"vocab_size": tokenizer.get_vocab_size(), "bos_token_id": 0, "eos_token_id": 0}
    qwen = Qwen2ForCausalLM(Qwen2Config(**SIZES, **vocabulary))
    save(qwen, tokenizer, directory / "qwen-int8", CHAT_TEMPLATE)
    quantize(directory / "qwen-int8")
    set_defaults(directory / "qwen-int8", {"top_k": 1})
    bloom = BloomConfig(hidden_size=64, n_layer=2, n_head=2, **vocabulary)
    save(BloomForCausalLM(bloom), tokenizer, directory / "bloom")
    begins = make_tokenizer(BEGIN)
    long = SIZES | {"max_position_embeddings": 2048}
    more = vocabulary | {"vocab_size": begins.get_vocab_size(), "bos_token_id": 1}
    tools = LlamaForCausalLM(LlamaConfig(**long, **more))
    save(tools, begins, directory / "tools", TOOL_TEMPLATE, bos_token=BEGIN)


def make_tokenizer(begin: str | None = None) -> Tokenizer:
    """One token a byte: a byte-level BPE without merges. `begin` comes before every text."""
    special = [END, begin] if begin else [END]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, 1)]
        )
    return tokenizer


def save(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    directory: Path,
    template: str | None = None,
    bos_token: str = END,
) -> None:
    model.save_pretrained(directory, safe_serialization=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    settings["bos_token"] = bos_token
    if template:
        settings["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def quantize(directory: Path) -> None:
    """Rewrite the linear layers as 8-bit integers, in the compressed-tensors format."""
    file = directory / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        if "_proj.weight" in name:
            scale = tensor.abs().amax(dim=1, keepdim=True) / 127
            tensors[name] = (tensor / scale).round().to(torch.int8)
            tensors[name.replace(".weight", ".weight_scale")] = scale
        else:
            tensors[name] = tensor
    save_file(tensors, file, metadata={"format": "pt"})
    eight_bits = {"num_bits": 8, "type": "int", "symmetric": True}
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**eight_bits, "strategy": "channel", "dynamic": False},
                "input_activations": {**eight_bits, "strategy": "token", "dynamic": True},
            }
        },
    }
    (directory / "config.json").write_text(json.dumps(config))


def set_defaults(directory: Path, sampling: dict[str, float]) -> None:
    """Sampling parameters of requests that leave them open."""
    file = directory / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | sampling))
