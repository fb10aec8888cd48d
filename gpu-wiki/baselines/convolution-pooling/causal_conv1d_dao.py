"""Causal depthwise convolution over time, by causal-conv1d.

Arguments: x (batch, channels, time), weight (channels, width), bias (channels)
Package: causal-conv1d
GPU: needed
Interface: https://github.com/Dao-AILab/causal-conv1d
"""

try:
    from causal_conv1d import causal_conv1d_fn
except ImportError as error:
    raise ImportError("causal-conv1d is not installed in this environment; run: pip install causal-conv1d") from error


def kernel_function(x, weight, bias):
    return causal_conv1d_fn(x, weight, bias)
