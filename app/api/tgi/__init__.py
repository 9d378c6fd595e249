"""Text Generation Inference's API."""
