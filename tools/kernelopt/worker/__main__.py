"""`python -m kernelopt.worker serve SOCKET_FD`; under a profiler `… once REQUEST_FILE RESULT_FILE STARTER [AHEAD]`."""

import gc
import json
import os
import sys
from pathlib import Path

from . import triton_hash

is_compiling_server = __name__ == "__main__" and sys.argv[1] == "serve" and os.environ.get("TRITON_INTERPRET") != "1"
hashing = triton_hash.computed_beside() if is_compiling_server else None
gc.disable()  # an import leaves next to no garbage; looking for it takes a fifth of torch's
from . import server  # imports torch

gc.enable()
sys.dont_write_bytecode = True  # from here on: what a candidate imports leaves no file, nor does what it starts
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"

if __name__ == "__main__":
    sys.path.pop(0)  # the working directory, where `-m` looks first: a candidate may write there
    if hashing:
        hashing.join()
    if sys.argv[1] == "serve":
        server.serve(int(sys.argv[2]))
    else:
        request, result, *others = sys.argv[2:]
        server.once(Path(request), Path(result), *map(json.loads, others))
