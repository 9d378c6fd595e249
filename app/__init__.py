"""The LLM API Service: durable results in front of NVIDIA Triton."""

__version__ = "0.1.0"
