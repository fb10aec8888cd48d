"""KernelBench level 1 no. 43: 3-d max pooling with stride 2 and dilation 3 (written anew in KernelBench's format)."""
import torch
import torch.nn as nn


class Model(nn.Module):
    """Max pooling over depth, height and width."""

    def __init__(self, kernel_size: int, stride: int = None, padding: int = 0, dilation: int = 1,
                 return_indices: bool = False, ceil_mode: bool = False):
        super().__init__()
        self.maxpool = nn.MaxPool3d(kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation,
                                    return_indices=return_indices, ceil_mode=ceil_mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.maxpool(x)


batch_size, channels = 16, 32
depth = height = width = 128
kernel_size, stride, padding, dilation = 3, 2, 1, 3


def get_inputs():
    return [torch.rand(batch_size, channels, depth, height, width)]



def get_init_inputs():
    return [kernel_size, stride, padding, dilation]
