"""What processes beside each other take of a GPU's memory beside their tensors, which the callers count.

No value here was measured: each leaves room. An exploration and a verification run what lacked memory beside others
again, alone, so a value that is too low costs time, and no verdict rests on it.
"""

WAITING_BYTES = 512 << 20  # a child that has started CUDA and waits for its job; not measured
WAITING_SHARE = 0.05  # of the free memory, for all waiting children (docs/verification.md); not measured
EXPLORING_BYTES = 700 << 20  # a process of an exploration, at work; not measured
EXPLORING_SHARE = 0.8  # of the free memory, for the processes of an exploration; not measured
VERIFYING_BYTES = 1 << 30  # a process of a verification, at work; not measured
VERIFYING_SHARE = 0.7  # of the free memory, for the processes of a verification; not measured
ASSUMED_FREE_BYTES = 16 << 30  # where the driver does not report the free memory; not measured
