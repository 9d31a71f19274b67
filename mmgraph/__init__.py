"""Custom ops and graph capture for multimodal models in PyTorch."""

__version__ = "0.1.0"
