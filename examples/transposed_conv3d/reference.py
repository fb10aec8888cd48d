"""KernelBench level 1 no. 77: transposed 3-d convolution with stride, padding and dilation (written anew in KernelBench's format)."""
import torch
import torch.nn as nn


class Model(nn.Module):
    """Transposed convolution of volumes; with stride 2, padding 1 and dilation 2 most of the output gets no contribution."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, padding: int = 0,
                 dilation: int = 1, bias: bool = False):
        super().__init__()
        self.conv_transpose3d = nn.ConvTranspose3d(in_channels, out_channels, kernel_size=(kernel_size,) * 3, stride=stride,
                                                   padding=padding, dilation=dilation, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv_transpose3d(x)


batch_size = 16
in_channels, out_channels = 32, 64
kernel_size, stride, padding, dilation = 3, 2, 1, 2
depth, height, width = 16, 32, 32


def get_inputs():
    return [torch.rand(batch_size, in_channels, depth, height, width)]



def get_init_inputs():
    return [in_channels, out_channels, kernel_size, stride, padding, dilation]
