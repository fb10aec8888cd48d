"""Small sizes for a machine without a GPU: MODELS_SMALL=1."""

import os

SMALL = os.environ.get("MODELS_SMALL") == "1"


def size(real: int, small: int) -> int:
    """A size of a model, or the small one that a CPU runs in seconds."""
    return small if SMALL else real
