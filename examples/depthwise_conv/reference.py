"""KernelBench level 1 no. 82: depthwise 2-d convolution with a square kernel (written anew in KernelBench's format)."""
import torch
import torch.nn as nn


class Model(nn.Module):
    """A convolution in which every channel has a filter of its own."""

    def __init__(self, in_channels: int, kernel_size: int, stride: int = 1, padding: int = 0, bias: bool = False):
        super().__init__()
        self.conv2d = nn.Conv2d(in_channels, in_channels, kernel_size, stride=stride, padding=padding,
                                groups=in_channels, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv2d(x)


batch_size, in_channels = 16, 64
kernel_size, stride, padding = 3, 1, 0
height = width = 512


def get_inputs():
    return [torch.rand(batch_size, in_channels, height, width)]



def get_init_inputs():
    return [in_channels, kernel_size, stride, padding]
