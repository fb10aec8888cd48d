"""The alternatives to a kernel: the reference as it is, or behind torch.compile, as files that can be timed."""

COMPILED = """

class ModelNew(Model):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.compiled = torch.compile(super().forward, mode={mode!r})

    def forward(self, *inputs):
        return self.compiled(*inputs)
"""
MODES = {"eager": None, "torch.compile": "default", "torch.compile max-autotune": "max-autotune-no-cudagraphs"}


def source(reference: bytes, name: str) -> bytes:
    """The file of a baseline out of MODES. CUDA graphs stay out: they would keep the addresses of the first inputs."""
    if MODES[name] is None:
        return reference
    return reference + b"\nimport torch\n" + COMPILED.format(mode=MODES[name]).encode()
