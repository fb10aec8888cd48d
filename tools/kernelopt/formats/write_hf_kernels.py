"""An accepted kernel as a package for Hugging Face kernels: the build variant for NVIDIA cards and any torch.

The source layout of kernel-builder (build.toml, torch-ext) is not written: nothing here could check it.
"""

import base64
import hashlib
import re

from .. import bundle
from ..errors import UsageError
from . import entry
from .artefact import Artefact, Export

VARIANT = "build/torch-cuda"  # accepted kernels were judged on NVIDIA cards; worker.exported loads this one
NAME = re.compile(r"[a-z][-a-z0-9]*[a-z0-9]")
DEPENDENCIES = ("einops", "helion", "nvidia-cutlass-dsl")  # those that `kernels` knows, besides torch and triton
SAID = {"else": "a package has no place for it"}


def write(export: Export) -> Artefact:
    """The package. UsageError when its name cannot be one."""
    name = export.options.name or re.sub(r"[^a-z0-9]+", "-", export.session.lower()).strip("-")
    if not NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot name a package; pass --name of two or more small letters, digits and dashes")
    function = name.replace("-", "_")
    sources = {"__init__.py": init(export, function), "kernel.py": export.source}
    metadata = bundle.dumps(metadata_of(export, name, sources))
    files = {f"{VARIANT}/{path}": text for path, text in {**sources, "metadata.json": metadata}.items()}
    files["README.md"] = card(export, name, function)
    return Artefact(files, "", "hf_kernels", (), remarks(export))


def init(export: Export, function: str) -> str:
    """__init__.py of the package."""
    kernel = "ModelNew" if export.is_model else "kernel_function"
    comment = "\n".join(f"# {line}" for line in export.provenance())
    public = [function, "ModelNew"] if export.is_model else [function]
    ending = f"\n__all__ = {public}\n".replace("'", '"')
    text = entry.text(export, function, [], "@")
    return "\n".join([comment, f"\n{entry.imports(export)}\nfrom .kernel import {kernel}\n", text]) + ending


def metadata_of(export: Export, name: str, sources: dict[str, str]) -> dict:
    """The object of metadata.json. id: the module's name in a process, different for each version."""
    digests = {path: base64.b64encode(hashlib.sha256(text.encode()).digest()) for path, text in sources.items()}
    return {
        "id": f"_{name.replace('-', '_')}_cuda_{export.record.git_commit_hash[:7]}",
        "name": name,
        "version": 1,
        "license": export.options.license,
        "python-depends": [package for package in export.packages if package in DEPENDENCIES],
        "backend": {"type": "cuda"},
        "digest": {"algorithm": "sha256", "files": {path: digest.decode() for path, digest in digests.items()}},
    }


CARD = """---
library_name: kernels
license: {license}
---

# {name}

{provenance}

```python
from pathlib import Path

from kernels import get_local_kernel

{function} = get_local_kernel(Path("FOLDER")).{function}
result = {function}({arguments})
```

{remarks}
"""


def card(export: Export, name: str, function: str) -> str:
    """README.md, the card of the package."""
    return CARD.format(
        license=export.options.license,
        name=name,
        provenance="\n".join(export.provenance()),
        function=function,
        arguments=", ".join([*export.inputs, *export.weights.values()]),
        remarks="\n".join(f"- {remark}" for remark in remarks(export)),
    )


def remarks(export: Export) -> tuple[str, ...]:
    remarks = [f"it changes {', '.join(export.mutated)} in place"] if export.mutated else []
    unknown = [name for name in export.packages if name not in ("torch", "triton", *DEPENDENCIES)]
    if unknown:
        remarks.append(f"`kernels` does not look whether {', '.join(unknown)} is installed, which kernel.py imports")
    return (*remarks, *export.remarks(SAID), "it has no gradients and no layers, one function alone")
