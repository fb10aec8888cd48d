// Found in place of torch's own torch/all.h (worker/light_headers.py): tensors, operators and streams, without torch::nn,
// torch::optim, torch::data, torch::serialize and torch::jit, which are most of what a compiler reads there.
#pragma once

#include <queue>

#include <torch/cuda.h>
#include <torch/enum.h>
#include <torch/types.h>
#include <torch/utils.h>
#include <torch/version.h>
