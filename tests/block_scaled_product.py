"""What a block-scaled product of the wiki's page on Blackwell compiles to. Print {capability format: instructions}."""

import json
import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

FORMATS = {  # name: (operand, its type, values a byte, values a scale, type of the scales)
    "MXFP8": ("e4m3", "*fp8e4nv", 1, 32, "*u8"),
    "MXFP4": ("e2m1", "*u8", 2, 32, "*u8"),
    "NVFP4": ("e2m1", "*u8", 2, 16, "*fp8e4nv"),
}
COMPILED = [("90", "NVFP4"), ("100", "MXFP8"), ("100", "MXFP4"), ("100", "NVFP4"), ("120", "NVFP4")]


@triton.jit
def product(a, b, a_scale, b_scale, out, FORMAT: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr):
    """One tile of 128 x 128 over k of 128. a, b: 128 x 128, packed along k; scales 128 x 128 / GROUP."""
    row = tl.arange(0, 128)[:, None]
    k, group = tl.arange(0, 128 // PACKED)[None, :], tl.arange(0, 128 // GROUP)[None, :]
    left, right = tl.load(a + row * (128 // PACKED) + k), tl.load(b + row * (128 // PACKED) + k)
    scale = row * (128 // GROUP) + group
    acc = tl.dot_scaled(left, tl.load(a_scale + scale), FORMAT, right.T, tl.load(b_scale + scale), FORMAT)
    tl.store(out + row * 128 + tl.arange(0, 128)[None, :], acc)


def instructions(capability: int, name: str) -> list[str]:
    """The tensor instructions in the PTX of a format."""
    operand, type_, packed, group, scales = FORMATS[name]
    constants = {"FORMAT": operand, "PACKED": packed, "GROUP": group}
    types = {"a": type_, "b": type_, "a_scale": scales, "b_scale": scales, "out": "*fp32"}
    source = ASTSource(product, types | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    return sorted(set(re.findall(r"\b(?:tcgen05\.mma|mma\.sync|wgmma\.mma_async)\.\S+", ptx)))


if __name__ == "__main__":
    print(json.dumps({f"{at} {name}": instructions(int(at), name) for at, name in COMPILED}))
