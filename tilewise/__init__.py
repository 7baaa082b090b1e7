"""Exact attention (FlashAttention) in O(n) memory."""

__version__ = "0.1.0"
