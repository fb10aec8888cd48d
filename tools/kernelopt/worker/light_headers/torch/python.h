// Found in place of torch's own torch/python.h (worker/light_headers.py): the conversions between Python's objects and
// C++'s, without the bindings of torch::nn. nvcc reads nothing here, unless the source speaks to Python itself.
#pragma once

#include <torch/types.h>

#if !defined(__CUDACC__) || defined(LIGHT_HEADERS_WITH_PYTHON)
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/python_headers.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/python_numbers.h>
#include <torch/csrc/utils/python_tuples.h>
#endif
