"""Measures variants of the CUDA kernels on a GPU, and chooses one; README.md has the commands."""
