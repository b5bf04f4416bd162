"""Activations and additions fused into the layers before them."""

from syncbn.fusion.fuse import explain_fusion, fuse_activations

__all__ = ["explain_fusion", "fuse_activations"]
