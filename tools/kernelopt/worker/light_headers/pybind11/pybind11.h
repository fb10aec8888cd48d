// Found before pybind11's own header (worker/light_headers.py). nvcc, for which torch/python.h is empty here, would not
// see torch's conversions: the extension would compile, and its calls fail.
#if defined(__CUDACC__) && !defined(LIGHT_HEADERS_WITH_PYTHON)
#error "pybind11 needs torch's own headers here"
#endif
#include_next <pybind11/pybind11.h>
