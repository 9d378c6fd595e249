"""The Llama architecture, just large enough to train the demo model.

Parameters carry the names Hugging Face gives them, so that a state dictionary is the exported file.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

INITIAL_DEVIATION = 0.02


@dataclass(frozen=True)
class Shape:
    """Parameters of the architecture, by the names of Hugging Face's config.json."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learned scale."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.hidden_size))
        self.eps = shape.rms_norm_eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Scale each vector to unit mean square."""
        return functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        key_value_size = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, key_value_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, key_value_size, bias=False)
        self.o_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Attend from every position to itself and those before it."""
        query, key, value = (
            projection(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = functional.scaled_dot_product_attention(
            _rotate(query, rotation), _rotate(key, rotation), value, is_causal=True, enable_gqa=True
        )
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output


class MLP(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply SwiGLU."""
        output: Tensor = self.down_proj(
            functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden)
        )
        return output


class Layer(nn.Module):
    """One decoder layer: attention, then the feed-forward block, each added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape)
        self.mlp = MLP(shape)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Pass every position through the layer."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Decoder(nn.Module):
    """Embedding, layers and final norm: what Hugging Face calls `model`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape)


class Llama(nn.Module):
    """A causal language model whose output layer is its embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        residual_deviation = INITIAL_DEVIATION / (2 * shape.num_hidden_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(
                    parameter, std=residual_deviation if into_residual else INITIAL_DEVIATION
                )

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token after each of `tokens` (batch, length)."""
        rotation = _rotation(self.shape, tokens.shape[1])
        hidden: Tensor = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            hidden = layer(hidden, rotation)
        return functional.linear(self.model.norm(hidden), self.model.embed_tokens.weight)


def save(model: Llama, directory: Path, end_of_text: int) -> None:
    """Write weights (bfloat16), config.json and generation_config.json, as transformers does."""
    weights = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    file = directory / "model.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors writes for the owner alone; a server may be another user
    special = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(model.shape),
        "head_dim": model.shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **special,
    }
    for name, content in (("config", config), ("generation_config", special)):
        (directory / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def load(directory: Path) -> Llama:
    """Read what `save` wrote, in float32."""
    config = json.loads((directory / "config.json").read_text())
    model = Llama(Shape(**{name: config[name] for name in Shape.__dataclass_fields__}))
    model.load_state_dict(load_file(directory / "model.safetensors"))
    return model.eval()


def _rotation(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, (length, head_dim)."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(length).float(), shape.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = rotation
    first, second = heads.chunk(2, dim=-1)
    rotated = heads * cosine + torch.cat((-second, first), dim=-1) * sine
    return rotated.to(heads.dtype)
