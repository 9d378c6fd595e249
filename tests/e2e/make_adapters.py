"""Two LoRA adapters of a tiny model: a part of make_models.py.

Each is in PEFT's files: low-rank additions to two projections of each layer.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

RANK, ALPHA = 4, 8
TOKENS = 12
SEEDS = {"dog": 1, "sheep": 2}
TARGETS = ("q_proj", "v_proj")


def make(weights: Path, directory: Path, prompt: str) -> dict[str, list[int]]:
    """Greedy tokens that transformers generates with the additions merged into the weights.

    By the adapter's name; an empty name is the model alone.
    """
    expected = {"": generate(weights, prompt, {})}
    for name, seed in SEEDS.items():
        torch.manual_seed(seed)
        additions = make_additions(weights)
        save(additions, directory / name)
        expected[name] = generate(weights, prompt, additions)
    return expected


def make_additions(weights: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The two factors of each addition, by the name of the module that it changes."""
    model = AutoModelForCausalLM.from_pretrained(weights)
    return {
        name: (
            torch.randn(RANK, module.in_features) / 4,
            torch.randn(module.out_features, RANK) / 4,
        )
        for name, module in model.named_modules()
        if name.endswith(TARGETS)
    }


def save(additions: dict[str, tuple[torch.Tensor, torch.Tensor]], directory: Path) -> None:
    directory.mkdir(parents=True)
    tensors = {}
    for name, (first, second) in additions.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = first
        tensors[f"base_model.model.{name}.lora_B.weight"] = second
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(TARGETS),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))


def generate(
    weights: Path, prompt: str, additions: dict[str, tuple[torch.Tensor, torch.Tensor]]
) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    modules = dict(model.named_modules())
    with torch.no_grad():
        for name, (first, second) in additions.items():
            modules[name].weight += (ALPHA / RANK) * second @ first
        ids = AutoTokenizer.from_pretrained(weights)(prompt, return_tensors="pt").input_ids
        length = ids.shape[1]
        for _ in range(TOKENS):
            best = model(ids).logits[0, -1].argmax()
            ids = torch.cat([ids, best.reshape(1, 1)], dim=1)
    return [int(one) for one in ids[0, length:]]
