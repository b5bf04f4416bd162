"""Subclasses of batch normalization, and an input for them."""

import torch
from torch import nn


def images(channels=3):
    return torch.randn(4, channels, 5, 5, dtype=torch.float64)


class WithoutMethods(nn.BatchNorm2d):
    pass


class Unchecked(nn.BatchNorm2d):
    def _check_input_dim(self, input):
        pass


class Square(nn.BatchNorm2d):
    def _check_input_dim(self, input):
        super()._check_input_dim(input)
        if input.size(2) != input.size(3):
            raise ValueError(f"expected a square, but got {list(input.shape)}")
