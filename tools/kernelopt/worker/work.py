"""The least work of a problem: FLOPs, the dtype that they are done in, and the bytes that go in and come out."""

import contextlib
import math
import statistics
from dataclasses import dataclass, replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ..hardware.work import COUNTED, CountedWorkload, Work
from . import blank, problem, tensor_trees, traffic
from .contract import CastOfQuantised, InvalidDeclaration
from .masked_products import MaskedProducts
from .state import saved

# A task with MUTATES is run for real, up to these sizes, to see which elements of its inputs change: some 10 s.
REAL_BYTES, REAL_FLOPS = 2 << 30, 20 * 10**9
DRAWS = 4  # where drawn numbers decide the FLOPs: timed calls have other draws than the counted one
SAME_PCT = 1.0  # FLOPs of draws that differ by less are called equal


@dataclass(frozen=True)
class Count:
    """What one run of a reference counts. bytes_held: of its inputs and parameters, read or not. drawn: it ran
    on shapes beside real whole numbers, which may decide what it computes. False for a run on real tensors alone, which
    takes too long to be repeated. numbers: those whole numbers; None without them, or with other contents too."""

    counted: CountedWorkload
    bytes_held: int
    drawn: bool
    numbers: tuple | None

    def is_small(self) -> bool:
        """Is it small enough to be run for real?"""
        return self.bytes_held <= REAL_BYTES and self.counted.work.flops <= REAL_FLOPS


class SameNumbers(Exception):
    """Another seed draws the whole numbers of the first."""


def estimate(reference: problem.Reference, workload: str, dtype: str | None, device: str) -> CountedWorkload:
    """Least work of a workload.

    FLOPs by torch's counter (`torch.utils.flop_counter`): matrix products, convolutions and attention. Products that it
    does not know are added here. masked_products.py takes off what masks and symmetric results spare. Element-wise and
    reduction arithmetic counts 0. dtype: that of the products' operands (`Operands`), or of most bytes where there is
    no product. Bytes: see traffic.py. Shapes alone are run (blank.py); a reference that looks at values runs for real,
    on `device`.
    """
    count = _counted(reference, workload, dtype, device)
    if count.drawn:
        others = (_flops_of_draw(reference, workload, dtype, device, seed, count) for seed in range(1, DRAWS))
        count = _mean(count, list(others))
    undeclared = tuple(at for at in count.counted.quantised if at not in reference.declarations.compare)
    count = replace(count, counted=replace(count.counted, quantised=undeclared))
    if not reference.declarations.mutates:
        return count.counted
    if not count.is_small():
        return replace(count.counted, uncounted="writes of inputs that MUTATES names: the task is too large to be run")
    work, changed = count.counted.work, traffic.changed_bytes(reference, workload, dtype, device)
    work = replace(work, bytes_out=work.bytes_out + changed, bytes_min=work.bytes_min + changed)
    return replace(count.counted, work=work)


def _flops_of_draw(
    reference: problem.Reference, workload: str, dtype: str | None, device: str, seed: int, first: Count
) -> int:
    """Those of the first draw where this seed gives the same whole numbers."""
    try:
        return _counted(reference, workload, dtype, device, seed, first.numbers).counted.work.flops
    except SameNumbers:
        return first.counted.work.flops


def _mean(count: Count, others: list[int]) -> Count:
    """The count with the mean FLOPs of its draw and of others, where these differ."""
    draws = [count.counted.work.flops, *others]
    if max(draws) - min(draws) <= SAME_PCT / 100 * max(draws):
        return count
    work = replace(count.counted.work, flops=round(statistics.mean(draws)))
    return replace(count, counted=replace(count.counted, work=work, drawn_flops=(min(draws), max(draws))))


def _counted(
    reference: problem.Reference,
    workload: str,
    dtype: str | None,
    device: str,
    seed: int = 0,
    counted: tuple | None = None,
) -> Count:
    """counted: whole numbers with which the reference ran already. Raises SameNumbers for these."""
    masks = MaskedProducts(product_registry())

    def count(model: torch.nn.Module, inputs: list) -> Count:
        if counted is not None and whole_numbers(model, inputs) == counted:
            raise SameNumbers
        return _count(model, inputs, dtype, reference.mutated(inputs), masks)

    decisive = (CastOfQuantised, InvalidDeclaration, SameNumbers)
    return blank.on_shapes(reference, workload, dtype, device, count, decisive, watch=masks, seed=seed)


def _count(
    model: torch.nn.Module, inputs: list, dtype: str | None, mutated: list[torch.Tensor], masks: MaskedProducts
) -> Count:
    """mutated: inputs whose changes the caller counts, so that results in them count nothing here. masks: has seen how
    the model and the inputs were made."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    # Attention and recurrent layers are counted through their plain products: the counter does not know every
    # fused CPU variant.
    plain = torch.backends.mkldnn.flags(enabled=False)
    causal, counter = CausalAttention(masks), FlopCounterMode(display=False, custom_mapping=MORE_PRODUCTS)
    operands = Operands(counter.flop_registry)
    arguments = tensor_trees.input_tensors(inputs)
    incoming = arguments + list(saved(model).values())
    reads = traffic.Reads(incoming)
    masks.begin([*arguments, *model.parameters()])
    with counter, sdpa_kernel(SDPBackend.MATH), plain, causal, operands, reads:
        outputs = tensor_trees.tensors(problem.call(model, inputs))
    places = {traffic.place(tensor) for tensor in mutated}
    bytes_in = reads.bytes_read()
    bytes_out = least_bytes([tensor for tensor in outputs if traffic.place(tensor) not in places])
    products, spared = int(counter.get_total_flops()), causal.spared + masks.spared(outputs)
    counted = Work(
        flops=products - spared,
        bytes_in=bytes_in,
        bytes_out=bytes_out,
        bytes_min=bytes_in + bytes_out,
        dtype=operands.dtype() or tensor_trees.dominant_dtype(incoming + outputs),
        also=tuple(operands.others()),
        cast_to=dtype,
        source=COUNTED,
        windowed_pct=round(100 * operands.windowed / products, 1) if operands.windowed else 0.0,
    )
    shapes = {"inputs": [list(t.shape) for t in arguments], "outputs": [list(t.shape) for t in outputs]}
    workload = CountedWorkload(
        counted,
        shapes,
        spared_pct=100 * spared / products if spared else 0.0,
        quantised=tuple(at for at, tensor in enumerate(outputs) if tensor.dtype in (torch.int8, torch.uint8)),
    )
    drawn = any(map(is_known_number, arguments)) and any(map(blank.is_blank, arguments))
    return Count(workload, least_bytes(incoming), drawn, whole_numbers(model, inputs) if drawn else None)


def whole_numbers(model: torch.nn.Module, inputs: list) -> tuple | None:
    """The contents that are known: (shape, bytes) of each tensor of whole numbers among the inputs and the model's own.
    None where other contents are known too."""
    incoming = tensor_trees.input_tensors(inputs) + list(saved(model).values())
    known = [tensor for tensor in incoming if not blank.is_blank(tensor)]
    if not all(map(is_known_number, known)):
        return None
    return tuple((tuple(tensor.shape), tensor.detach().numpy().tobytes()) for tensor in known)


def is_known_number(tensor: torch.Tensor) -> bool:
    """Is it a tensor of whole numbers with contents?"""
    return not (tensor.is_floating_point() or tensor.is_complex() or blank.is_blank(tensor))


def least_bytes(values: list[torch.Tensor]) -> int:
    """Bytes of memory that `values` cover. What several views of a storage share counts once."""
    return sum(map(traffic.covered_bytes, traffic.extents(values).values()))


def product_flops(matrix: tuple, vector: tuple, *_, **__) -> int:
    """FLOPs of a matrix (or a vector) times a vector, from their shapes."""
    return 2 * math.prod(matrix)


def grouped_flops(a: tuple, b: tuple, *_, **__) -> int:
    """FLOPs of a product of groups of rows (2-d) or of a batch (3-d), from the shapes (.., M, K) and (.., K, N)."""
    return 2 * (a[0] if len(a) == len(b) == 3 else 1) * a[-2] * a[-1] * b[-1]


ATEN = torch.ops.aten
MORE_PRODUCTS = {  # products that torch's counter omits, as far as this torch has them
    getattr(ATEN, name): flops
    for name, flops in {
        "mv": product_flops,
        "dot": product_flops,
        "addmv": lambda _, *args, **rest: product_flops(*args),
        "_int_mm": grouped_flops,
        "_grouped_mm": grouped_flops,
        "_scaled_grouped_mm": grouped_flops,
    }.items()
    if hasattr(ATEN, name)
}


def product_registry() -> dict:
    """What counts the FLOPs of an operation, by operation."""
    from torch.utils.flop_counter import FlopCounterMode

    return FlopCounterMode(display=False, custom_mapping=MORE_PRODUCTS).flop_registry


ADDED_FIRST = {ATEN.addmm, ATEN.baddbmm, ATEN.addmv}  # their first argument is added to the product
BITS = {"fp64": 64, "fp32": 32, "fp16": 16, "bf16": 16, "fp8": 8, "int8": 8, "fp4": 4}
SCALING = {ATEN.mul, ATEN.div, ATEN.sub}  # by a scale, or less a zero point
# The first argument's numbers, elsewhere.
COPYING = {
    *(ATEN._to_copy, ATEN.clone, ATEN.copy_, ATEN.detach, ATEN.alias, ATEN.cat, ATEN.stack, ATEN.constant_pad_nd),
    *(ATEN.index, ATEN.gather, ATEN.index_select, ATEN.embedding, ATEN.repeat_interleave, ATEN.repeat),
}
# The numbers of the argument at this place, put among those of the first one.
PUTTING = {ATEN.scatter: 3, ATEN.scatter_: 3, ATEN.index_put: 2, ATEN.index_put_: 2, ATEN.masked_scatter_: 2}
PUTTING |= {ATEN.masked_scatter: 2}
FILLED = {ATEN.zeros, ATEN.full, ATEN.empty, ATEN.zeros_like, ATEN.full_like, ATEN.empty_like}  # new tensors
FILLED |= {ATEN.new_zeros, ATEN.new_full, ATEN.new_empty}
MANY_CHANNELS = 64  # a guess: with fewer the bytes that such a form moves weigh more than its products
PART = 0.05  # of the FLOPs: a dtype with less does not count


class Operands(TorchDispatchMode):
    """Sees each operation of a reference and keeps, by the dtype of their operands, how many FLOPs its products take.

    A reference may convert its operands before a product, for a product of 8-bit numbers runs nowhere on a CPU. So the
    dtype is the one that the numbers came in: conversions, copies and scales keep it, other arithmetic on 8-bit numbers
    gives 16 bits. A scale is a tensor that came from fewer elements, however it was expanded. uint8 counts as numbers
    once it is converted: before that it may be a mask, or indices. Numbers that scatter or an index puts into a new
    tensor, as a sparse weight's into zeros, keep their dtype too.
    """

    def __init__(self, flops_of: dict):
        super().__init__()
        self._flops_of = flops_of
        self._came_in = WeakIdKeyDictionary()  # tensor -> name of the original dtype of its numbers
        self._elements = WeakIdKeyDictionary()  # tensor -> its number of elements before it was expanded
        self._filled = WeakIdKeyDictionary()  # new tensors, which hold no numbers of others
        self._flops: dict[str, int] = {}
        self.windowed = 0  # of all FLOPs: `has_winograd`

    def dtype(self) -> str | None:
        """The dtype of most FLOPs; None when there was no product."""
        return max(self._flops, key=self._flops.get) if any(self._flops.values()) else None

    def others(self) -> list[str]:
        """The other dtypes with a PART of the FLOPs."""
        least = PART * sum(self._flops.values())
        return sorted(name for name, flops in self._flops.items() if flops > least and name != self.dtype())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        operation = function._overloadpacket
        if operation in FILLED:
            self._filled[result] = True
        tensors = tensor_trees.input_tensors([*args, *kwargs.values()])
        given = [tensor for tensor in tensors if self._is_number(tensor)]
        if operation in self._flops_of:
            first = 1 if operation in ADDED_FIRST else 0
            name = widest([self._name(tensor) for tensor in args[first : first + 2]])
            flops = int(self._flops_of[operation](*args, **kwargs, out_val=result))
            self._flops[name] = self._flops.get(name, 0) + flops
            self.windowed += flops if BITS[name] > 8 and has_winograd(operation, args, result) else 0
            self._keep(result, at_least_16_bits(name))
        elif operation in PUTTING and len(args) > PUTTING[operation]:
            self._put(result, args[0], args[PUTTING[operation]])
        elif tensors and (function.is_view or operation in COPYING):
            self._keep(result, *self._copied(tensors[0], result))
        elif given:
            name = self._name(max(given, key=lambda tensor: (self._count(tensor), -BITS[self._name(tensor)])))
            scaled = operation in SCALING and len({self._count(tensor) for tensor in given}) == len(given)
            self._keep(result, name if scaled else at_least_16_bits(name))
        if function._schema.is_mutable and operation not in PUTTING and tensors:
            self._filled.pop(tensors[0], None)
        return result

    def _copied(self, source: torch.Tensor, result) -> tuple[str | None, int]:
        """(name, elements) of a copy: a uint8 that is converted to a float is a number from then on."""
        became = isinstance(result, torch.Tensor) and result.dtype.is_floating_point and source.dtype == torch.uint8
        name = "int8" if became else self._name(source) if self._is_number(source) else None
        return name, min(self._count(source), result.numel() if isinstance(result, torch.Tensor) else source.numel())

    def _put(self, result, into: torch.Tensor, source) -> None:
        """The numbers of `source` were put among those of `into`. A single number counts as nothing; neither do whole
        numbers, as of a mask."""
        given = [one for one in (into, source) if isinstance(one, torch.Tensor) and one not in self._filled]
        names = [self._name(one) for one in given if one.dim() and self._is_number(one)]
        if names:
            self._keep(result, widest(names))
            self._filled.pop(result, None)
        elif into in self._filled:
            self._filled[result] = True

    def _is_number(self, tensor: torch.Tensor) -> bool:
        return number_name(tensor.dtype) is not None or tensor in self._came_in

    def _count(self, tensor: torch.Tensor) -> int:
        return self._elements.get(tensor, tensor.numel())

    def _name(self, tensor: torch.Tensor) -> str:
        """The narrower of its dtype and the original dtype of its numbers."""
        own = number_name(tensor.dtype) or "fp32"  # a product of whole numbers wider than 8 bits
        return min(own, self._came_in.get(tensor, own), key=BITS.get)

    def _keep(self, result, name: str | None, elements: int | None = None) -> None:
        for tensor in tensor_trees.input_tensors([result]):
            if name:
                self._came_in[tensor] = name
            if elements is not None:
                self._elements[tensor] = elements


def has_winograd(operation, args: tuple, result: torch.Tensor) -> bool:
    """Is it a dense convolution whose window has three or more places along an axis, with stride and dilation 1 and two
    results or more there? Winograd's form of it takes fewer products, and moves more bytes: few channels do not count.
    Gradients and transposed convolutions, which may have such a form too, do not either."""
    if operation is not ATEN.convolution:
        return False
    _, weight, _, stride, _, dilation, transposed, _, groups = args
    axes = zip(weight.shape[2:], stride, dilation, result.shape[2:], strict=True)
    along = any(size >= 3 and step == gap == 1 and results > 1 for size, step, gap, results in axes)
    return along and not transposed and groups == 1 and min(weight.shape[:2]) >= MANY_CHANNELS


def number_name(dtype: torch.dtype) -> str | None:
    """ "bf16", "fp8", "fp4", "int8"; None for whole numbers that may be indices or masks."""
    if dtype == torch.int8:
        return "int8"
    if "float4" in str(dtype):
        return "fp4"
    return tensor_trees.dtype_class(dtype) if dtype.is_floating_point or dtype.is_complex else None


def widest(names: list[str]) -> str:
    """The dtype that two operands can meet in: the wider one, bf16 where they are 8 bits of two kinds."""
    name = max(names, key=BITS.get)
    return name if all(BITS[other] < BITS[name] or other == name for other in names) else at_least_16_bits(name)


def at_least_16_bits(name: str) -> str:
    return name if BITS[name] >= 16 else "bf16"


class CausalAttention(torch.overrides.TorchFunctionMode):
    """Counts in `spared` the FLOPs of attention that `is_causal` removes, for sizes too of which no mask is computed.
    Torch's counter counts the whole square. masks: leaves that attention alone."""

    def __init__(self, masks: MaskedProducts):
        super().__init__()
        self.spared = 0
        self._masks = masks

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is not torch.nn.functional.scaled_dot_product_attention:
            return function(*args, **kwargs)
        spared = self.spared_by(*args, **kwargs)
        self.spared += spared
        with self._masks.paused() if spared else contextlib.nullcontext():
            return function(*args, **kwargs)

    @staticmethod
    def spared_by(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **_) -> int:
        """query: (..., L, E), key: (..., S, E), value: (..., S, V); query i sees the keys up to i."""
        if not is_causal:
            return 0
        rows, columns = query.shape[-2], key.shape[-2]
        seen = sum(min(row + 1, columns) for row in range(rows))
        products = 2 * math.prod(query.shape[:-2]) * (query.shape[-1] + value.shape[-1])
        return products * (rows * columns - seen)
