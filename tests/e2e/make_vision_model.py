"""A tiny random model with vision: a part of make_models.py.

It is an Idefics3, one of the families whose processors need no torchvision:
a vision encoder of 28 x 28 pixels, a connector to 4 tokens, and a Llama of two layers.
"""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Idefics3Config, Idefics3ForConditionalGeneration

END, IMAGE = "<|endoftext|>", "<image>"
AROUND, GLOBAL, UTTERANCE = "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"
SPECIAL = [END, IMAGE, AROUND, GLOBAL, UTTERANCE, "<row_1_col_1>"]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}assistant: "
)
PIXELS = 28
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": PIXELS,
    "patch_size": 7,
}
TEXT = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def make(directory: Path) -> None:
    torch.manual_seed(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    config = Idefics3Config(
        vision_config=VISION,
        text_config=TEXT | {"vocab_size": len(vocabulary)},
        image_token_id=1,
        scale_factor=2,
        pad_token_id=0,
    )
    model = Idefics3ForConditionalGeneration(config)
    with torch.no_grad():  # untrained, it would hardly see the image
        for parameter in model.model.connector.parameters():
            parameter.mul_(30)
    model.save_pretrained(directory, safe_serialization=True)
    save_tokenizer(vocabulary, directory)
    save_processor(directory)


def save_tokenizer(vocabulary: dict[str, int], directory: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(directory / "tokenizer.json"))
    write(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "processor_class": "Idefics3Processor",
            "bos_token": END,
            "eos_token": END,
            "pad_token": END,
            "chat_template": TEMPLATE,
            "extra_special_tokens": {
                "image_token": IMAGE,
                "fake_image_token": AROUND,
                "global_image_token": GLOBAL,
                "end_of_utterance_token": UTTERANCE,
            },
        },
    )


def save_processor(directory: Path) -> None:
    steps = ("do_convert_rgb", "do_normalize", "do_pad", "do_rescale", "do_resize")
    write(
        directory / "preprocessor_config.json",
        {
            **dict.fromkeys(steps, True),
            "do_image_splitting": False,
            "image_processor_type": "Idefics3ImageProcessor",
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "max_image_size": {"longest_edge": PIXELS},
            "size": {"longest_edge": PIXELS},
            "resample": 1,
            "rescale_factor": 1 / 255,
            "processor_class": "Idefics3Processor",
        },
    )
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": 4}
    write(directory / "processor_config.json", processor)


def write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content))
