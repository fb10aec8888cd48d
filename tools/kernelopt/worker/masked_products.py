"""What masks spare of a reference's products: those of scores that a mask replaces before softmax or exp, and those
with the zeros that come of it.

A mask counts where the inputs' values do not decide it: it is made of shapes, ranges, constants and buffers. A count
that is too high makes the gate refuse a fast and right kernel; one that is too low makes the floor less strict, while
verification still finds a kernel that leaves work out. So masks are followed far, by rules that keep what a kernel must
do; docs/limits.md has the cases in which too much is taken off:

- what cannot be followed counts whole: a reshape that mixes masked elements and others, operations that are not in
  CHAIN, the backward pass of autograd, masks of more than LARGEST elements;
- a result that is also used without its mask counts whole there, and so does one whose mask is not for softmax or exp;
- a zero counts as spared where it comes of a mask, never where values make it, as in ReLU;
- a row whose scores are all masked by a finite number counts whole: softmax takes the mean of its values.
"""

import contextlib
import math
import operator
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from . import blank, tensor_trees
from .mask_constants import Deferred, deferred
from .mask_numbers import (
    LARGEST,
    LOW,
    PIECE,
    Numbers,
    TooMany,
    by_numbers,
    coded,
    numbers_of,
    once,
    one_thread,
    side_by_side,
)
from .symmetric_products import Symmetric
from .traffic import place

ATEN = torch.ops.aten
PRODUCTS = {ATEN.mm: 0, ATEN.bmm: 0, ATEN.addmm: 1, ATEN.baddbmm: 1}  # where their two operands begin
SOFTMAX = {getattr(ATEN, name) for name in ("_softmax", "_safe_softmax") if hasattr(ATEN, name)}
HIGHEST = {ATEN.amax, ATEN.max, ATEN.logsumexp}  # reductions that low scores do not change
SOME_LOW = 2 * LOW  # stands for low numbers; in 16 bits too it is one
# Operations on single elements that give NaN for NaN, so that NaN can stand for a number that the inputs decide.
CHAIN = {
    *("add", "sub", "mul", "div", "neg", "tanh", "exp", "exp2", "sigmoid", "clamp", "clamp_min", "clamp_max"),
    *("minimum", "maximum", "masked_fill", "where", "_to_copy", "clone"),
}
ALL = Numbers.alike(torch.ones((), dtype=torch.bool, device="cpu"))  # every element
NONE = ALL.mapped(torch.logical_not)


@dataclass(eq=False)
class Product:
    """A product of matrices. by_operands: the share of its FLOPs that zeros of masks leave, or that give one half of a
    symmetric result and its diagonal. uses: by view of its result, which elements of it are needed, True or False."""

    flops: int
    elements: int
    by_operands: Fraction
    uses: dict[tuple, Numbers] = field(default_factory=dict)

    def need(self, part: torch.Tensor, needed: Numbers) -> None:
        """part: a view of a blank tensor, which tells where in the result the elements lie."""
        key = tuple(part.shape), part.stride(), part.storage_offset()
        self.uses[key] = either(needed, self.uses[key]) if key in self.uses else needed

    def spared(self) -> int:
        """FLOPs. Elements that several views need are not told apart: they count once for each."""
        needed = sum(math.prod(shape) * share(one) for (shape, _, _), one in self.uses.items())
        by_result = Fraction(needed) / (self.elements or 1) if self.uses else 1
        return int(self.flops * (1 - min(self.by_operands, by_result)))


@dataclass(eq=False)
class Joined:
    """Results of products that cat lays side by side. pieces: of each, the size along the dimension and its sources."""

    shape: torch.Size
    dim: int
    pieces: list[tuple[int, tuple]]

    def need(self, part: torch.Tensor, needed: Numbers) -> None:
        """part: see Product.need; of another view than the whole, all is needed."""
        # Not part._base: views by detach, and views in inference mode, have none.
        whole, start = part.is_contiguous() and part.shape == self.shape and part.storage_offset() == 0, 0
        for size, sources in self.pieces:
            codes = needed.expanded(part.shape).narrow(self.dim, start, size) if whole else None
            for product, its_part in sources:
                product.need(its_part, needed.viewed(codes) if whole else ALL)
            start += size


@dataclass(frozen=True)
class Followed:
    """What is known of a tensor that the inputs decide. numbers: what a mask made of it, NaN elsewhere; None without a
    mask. sources: the products whose results it holds element by element, each with the view of a blank tensor that
    tells which elements."""

    numbers: Numbers | None
    sources: tuple[tuple[Product | Joined, torch.Tensor], ...] = ()

    def need(self, needed: Numbers | None = None) -> None:
        """needed: the elements that something uses; None: all."""
        for product, part in self.sources:
            product.need(part, ALL if needed is None else needed)


class MaskedProducts(TorchDispatchMode):
    """Sees how a reference is built and what its call does. What the inputs do not decide is computed for real."""

    def __init__(self, flops_of: dict):
        super().__init__()
        self._flops_of = flops_of
        self._constants = WeakIdKeyDictionary()  # tensor -> a real one on the CPU, or a Deferred
        self._coded = WeakIdKeyDictionary()  # tensor -> the Numbers of a constant
        self._large_codes = weakref.WeakSet()
        self._last_join = [], None
        self._followed = WeakIdKeyDictionary()  # tensor -> Followed
        self._products: list[Product] = []
        self._symmetric = Symmetric()
        self._paused = True  # until the call begins
        self._written_numbers = WrittenNumbers(self)

    def __enter__(self):
        self._written_numbers.__enter__()
        return super().__enter__()

    def __exit__(self, *raised):
        super().__exit__(*raised)
        self._written_numbers.__exit__(*raised)

    def begin(self, decisive: list[torch.Tensor]) -> None:
        """The call begins. decisive: inputs and parameters, whose values are open however they were made."""
        self._products, self._paused = [], False
        for tensor in decisive:
            self._forget(tensor)

    def spared(self, outputs: list[torch.Tensor]) -> int:
        """FLOPs that masks, and symmetric results, spare in the call."""
        with torch._C._DisableTorchDispatch(), one_thread():
            self._need_whole(outputs)
            return sum(product.spared() for product in self._products)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, no mask spares anything."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function.namespace != "prim":  # which ask for a device
            with torch._C._DisableTorchDispatch(), one_thread():
                self._see(function, args, kwargs, tensor_trees.input_tensors([result]))
        return result

    def keep(self, tensor: torch.Tensor, data) -> None:
        """data: the numbers of the tensor."""
        with torch._C._DisableTorchDispatch():
            self._constants[tensor] = torch.tensor(data, dtype=tensor.dtype, device="cpu")

    def _see(self, function, args: tuple, kwargs: dict, made: list[torch.Tensor]) -> None:
        given = tensor_trees.input_tensors([*args, *kwargs.values()])
        written = blank.written(function, args, kwargs) if function._schema.is_mutable else []
        drawn = torch.Tag.nondeterministic_seeded in function.tags
        if not drawn and all(one in self._constants for one in given):
            made_of, found = self._made_of_constants(function, args, kwargs, made, written), {}
        else:
            made_of, found = {}, self._found(function, args, kwargs, given, made)
        for tensor in written if not made_of else ():
            self._forget(tensor)
        self._constants.update(made_of)
        self._followed.update(found)

    def _made_of_constants(self, function, args, kwargs, made: list, written: list) -> dict:
        """The real ones by tensor; {} where there is none. An operation in place changes them, and so their views."""
        fits = function.is_view or sum(one.numel() for one in made) <= LARGEST
        single = name_of(function) in CHAIN or torch.Tag.pointwise in function.tags
        by_element = single and not written and not (name_of(function) == "clone" and fits)  # a view may follow a clone
        try:
            if not written and not function.is_view and len(made) == 1 and made[0].numel() > PIECE:
                later = self._deferred(function, by_element, args, kwargs, made[0])
                if later is not None:
                    return {made[0]: later}
            self._settle(written)
            real = tensor_trees.map_tensors((args, on_cpu(kwargs)), self._real)
            results = [by_elements(function, *real)] if by_element else [function(*real[0], **real[1])] if fits else []
            pairs = zip(made, tensor_trees.input_tensors(results), strict=True)
            return {tensor: one.expand(tensor.shape) if by_element else one for tensor, one in pairs}
        except Exception:  # it is too large, or the CPU lacks it
            return {}

    def _deferred(self, function, by_element: bool, args: tuple, kwargs: dict, made: torch.Tensor) -> Deferred | None:
        """The result of an operation on constants, if it may be put off. Raises ValueError where it is too large."""
        args, kwargs = tensor_trees.map_tensors((args, on_cpu(kwargs)), self._constants.get)
        if by_element:
            later = Deferred(function, args, kwargs, made.shape, made.dtype)
        else:
            later = deferred(name_of(function), args, kwargs, made)
        if later is not None and math.prod(later.shape) > LARGEST:
            raise ValueError("too large")
        return later

    def _real(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of a constant."""
        if isinstance(self._constants[tensor], Deferred):
            self._constants[tensor] = self._constants[tensor].real()
        return self._constants[tensor]

    def _settle(self, written: list[torch.Tensor]) -> None:
        """These constants are about to be written: computes what was put off and needs their numbers of now."""
        places = {place(self._real(one)) for one in written}
        if places:
            self._coded.clear()
            late = [one for one, held in self._constants.items() if isinstance(held, Deferred)]
            for one in late:
                if not places.isdisjoint(self._constants[one].storages()):
                    self._real(one)

    def _found(self, function, args: tuple, kwargs: dict, given: list, made: list) -> dict:
        """What is then known of the results, by tensor. Notes which elements of products the operation needs."""
        operation = function._overloadpacket
        first = self._followed.get(args[0]) if args and isinstance(args[0], torch.Tensor) else None
        if not self._paused:
            if function.is_view or operation is ATEN._unsafe_view:
                return self._viewed(function, first, args, kwargs, made) if first else {}
            self._symmetric.see(function, given, made)
            if name_of(function) in CHAIN:
                return self._chained(getattr(ATEN, name_of(function)), args, kwargs, given, made[0])
            if function is ATEN.cat.default:  # not into memory that is given
                return self._laid_side_by_side(*args, **kwargs, made=made[0])
            if operation in PRODUCTS:
                return self._multiplied(operation, args, kwargs, given, made[0])
            if first and first.numbers is not None and operation in SOFTMAX:
                with contextlib.suppress(TooMany):
                    return self._softmaxed(first, args[1], made[0])
            if first and first.numbers is not None and operation in HIGHEST:
                return self._highest(first, function, args, kwargs, made[0])
        self._need_whole(given)
        return {}

    def _viewed(self, function, known: Followed, args: tuple, kwargs: dict, made: list) -> dict:
        def views(tensor: torch.Tensor) -> list[torch.Tensor]:
            try:
                return tensor_trees.input_tensors([function(tensor, *args[1:], **kwargs)])
            except RuntimeError:  # an expanded dimension does not merge with others; a blank tensor must stay a view
                if tensor.is_meta or tensor.is_contiguous() or tensor.numel() > LARGEST:
                    raise
                return views(tensor.contiguous())

        def numbers_of_views(numbers: Numbers | None) -> list[Numbers | None]:
            if numbers is None:
                return [None] * len(made)
            return [numbers.viewed(codes) for codes in views(numbers.expanded(args[0].shape))]

        if any(one.dtype != args[0].dtype for one in made):  # the bits of its elements, read as others
            known.need()
            return {}
        try:
            numbers = numbers_of_views(known.numbers)
            parts = [[(product, one) for one in views(part)] for product, part in known.sources]
            sources = zip(*parts, strict=True) if parts else [()] * len(made)
            return {one: Followed(*each) for one, *each in zip(made, numbers, sources, strict=True)}
        except RuntimeError:  # the elements do not lie so that a view can have them
            known.need()
            return {}

    def _chained(self, operation, args: tuple, kwargs: dict, given: list, made: torch.Tensor) -> dict:
        before = [self._followed[one] for one in given if one in self._followed]
        numbers = self._numbers(operation, args, kwargs, given) if made.is_floating_point() else None
        masked = any(known.numbers is not None for known in before)
        if numbers is None or not (masked or numbers.mapped(lambda values: values <= LOW).any()):
            numbers = None  # no mask, or it is not for softmax
        ends = numbers is not None and numbers.mapped(lambda values: values == 0).any()
        sources = []
        for product, part in (source for known in before for source in known.sources):
            if part.shape != made.shape:
                product.need(part, ALL)
            elif ends:
                product.need(part, numbers.mapped(torch.isnan))
            else:
                sources.append((product, part))
        known = Followed(numbers, tuple(sources))
        return {made: known} if sources or numbers is not None else {}

    def _numbers(self, operation, args: tuple, kwargs: dict, given: list) -> Numbers | None:
        """The result of an operation of CHAIN, NaN where the inputs decide it; None where they decide all."""
        unknown = [one for one in given if not self._is_known(one)]
        if len(unknown) == len(given):
            return None

        def numbers(tensor: torch.Tensor, flag: bool) -> Numbers:
            if self._is_known(tensor):
                return self._known(tensor)
            value = flag if tensor.dtype == torch.bool else math.nan
            return alike(tensor.dim(), value, tensor.dtype)

        try:
            results = []
            for flag in (False, True) if any(one.dtype == torch.bool for one in unknown) else (False,):
                values = tensor_trees.map_tensors((args, on_cpu(kwargs)), lambda one, flag=flag: numbers(one, flag))
                results.append(by_numbers(lambda *given: decided(operation, *given), *values))
            return results[0] if len(results) == 1 else by_numbers(equal_or_unknown, *results)
        except Exception:  # whole numbers that the inputs decide, or more than LARGEST elements
            return None

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return self._followed[tensor].numbers is not None if tensor in self._followed else tensor in self._constants

    def _known(self, tensor: torch.Tensor) -> Numbers:
        if tensor in self._followed:
            return self._followed[tensor].numbers
        if tensor not in self._coded:
            self._coded[tensor] = self._shared(self._numbers_of_constant(self._constants[tensor]))
        return self._coded[tensor]

    @staticmethod
    def _numbers_of_constant(constant) -> Numbers:
        if isinstance(constant, Deferred):
            return coded(constant.shape, constant.dtype, constant.__getitem__)
        return numbers_of(constant)

    def _shared(self, numbers: Numbers) -> Numbers:
        """With the codes of an equal mask, as one that each layer makes anew."""
        codes = numbers.codes
        if codes.tensor.numel() <= PIECE:
            return numbers
        for other in self._large_codes:
            if other.tensor.shape == codes.tensor.shape and torch.equal(other.tensor, codes.tensor):
                return Numbers(other, numbers.values)
        self._large_codes.add(codes)
        return numbers

    def _laid_side_by_side(self, tensors: list, dim: int = 0, *, made: torch.Tensor) -> dict:
        tensors = [one for one in tensors if one.numel()]  # empty ones may have one dimension
        numbers = None
        if made.is_floating_point() and any(map(self._is_known, tensors)):
            with contextlib.suppress(Exception):  # TooMany, or the CPU lacks it
                unknown = alike(made.dim(), math.nan, made.dtype)
                known = [self._known(one) if self._is_known(one) else unknown for one in tensors]
                numbers = self._joined_numbers(known, [one.shape for one in tensors], dim)
        pieces = [(one.shape[dim], self._followed[one].sources if one in self._followed else ()) for one in tensors]
        if not any(sources for _, sources in pieces):
            return {made: Followed(numbers)} if numbers is not None else {}
        return {made: Followed(numbers, ((Joined(made.shape, dim, pieces), torch.empty(made.shape, device="meta")),))}

    def _joined_numbers(self, numbers: list[Numbers], shapes: list[torch.Size], dim: int) -> Numbers:
        """With the codes of the join before, if that was of the same codes, as it is of head after head."""
        before, codes, *at = self._last_join
        if at != [shapes, dim] or not all(map(alike_but_for_values, before, numbers)):
            codes = side_by_side(numbers, shapes, dim)
            self._last_join = numbers, codes, shapes, dim
        return Numbers(codes, torch.cat([one.values for one in numbers]))

    def _softmaxed(self, known: Followed, dim: int, made: torch.Tensor) -> dict:
        low, level = low_and_level(known.numbers, dim)
        known.need(by_numbers(lambda low, level: ~low | level, low, level))
        zeros = by_numbers(lambda low, level: torch.where(low & ~level, 0.0, math.nan).to(made.dtype), low, level)
        return {made: Followed(zeros)}

    def _highest(self, known: Followed, function, args: tuple, kwargs: dict, made: torch.Tensor) -> dict:
        """The highest number along a dimension is low where all are low and one is finite, and open elsewhere."""
        given = dict(zip((one.name for one in function._schema.arguments), args, strict=False)) | kwargs
        dims = given.get("dim", [])
        dims = [dims] if isinstance(dims, int) else dims
        known.need(known.numbers.mapped(lambda values: ~(values <= LOW)))
        try:
            level = low_and_level(known.numbers, dims[0])[1] if len(dims) == 1 else NONE
        except TooMany:
            return {made: Followed(alike(made.dim(), SOME_LOW, made.dtype))}
        if not level.any():
            return {}
        rows = level.mapped(torch.logical_not).all_along(dims[0])
        codes = rows.codes.tensor if given.get("keepdim") else rows.codes.tensor.squeeze(dims[0])
        lows = rows.viewed(codes).mapped(lambda open_: torch.where(open_, math.nan, SOME_LOW).to(made.dtype))
        return {made: Followed(lows)}

    def _multiplied(self, operation, args: tuple, kwargs: dict, given: list, made: torch.Tensor) -> dict:
        self._need_whole(given)
        operands = args[PRODUCTS[operation] : PRODUCTS[operation] + 2]
        left = [
            share(one.numbers.mapped(lambda values: values != 0))
            for one in map(self._followed.get, operands)
            if one and one.numbers is not None
        ]
        flops = int(self._flops_of[operation](*args, **kwargs, out_val=made))
        left.append(self._symmetric.share_of_product(*operands, made, args[0] if PRODUCTS[operation] else None))
        self._products.append(Product(flops, made.numel(), min(left)))
        product = Followed(None, ((self._products[-1], torch.empty(made.shape, device="meta")),))
        if PRODUCTS[operation] == 0 or kwargs.get("beta", 1) != 1:
            return {made: product}
        self._followed[made] = product  # the first argument is added to it, and may be a mask
        return self._chained(ATEN.add, (made, args[0]), {}, [made, args[0]], made)

    def _need_whole(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor in self._followed:
                self._followed[tensor].need()

    def _forget(self, tensor: torch.Tensor) -> None:
        """The tensor is written, and so are its views: they still hold results of products, but not what masks left.
        What its new numbers are is the caller's affair."""
        self._symmetric.forget(tensor)
        for kept in (self._constants, self._followed):
            for other in [one for one in list(kept) if place(one) == place(tensor)]:
                known = kept.pop(other)
                if kept is self._followed and other is not tensor:
                    kept[other] = Followed(None, known.sources)


class WrittenNumbers(torch.overrides.TorchFunctionMode):
    """Tells `masks` the numbers in calls of torch.tensor, which no dispatch mode sees."""

    def __init__(self, masks: MaskedProducts):
        super().__init__()
        self._masks = masks

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.tensor and args and not tensor_trees.input_tensors([args[0]]):
            self._masks.keep(result, args[0])
        return result


def alike(dims: int, value, dtype: torch.dtype) -> Numbers:
    """Of a tensor of so many dimensions whose elements all are `value`."""
    return Numbers.alike(torch.full([1] * dims, value, dtype=dtype, device="cpu"))


def alike_but_for_values(a: Numbers, b: Numbers) -> bool:
    return len(a.values) == len(b.values) and (len(a.values) == 1 or a.codes.same(b.codes))


def name_of(function) -> str:
    """The operation's name; that of the same one out of place, where it works in place."""
    return function._overloadpacket.__name__.rstrip("_")


def on_cpu(kwargs: dict) -> dict:
    return kwargs | {"device": torch.device("cpu")} if kwargs.get("device") else kwargs


def either(a: Numbers, b: Numbers) -> Numbers:
    try:
        return by_numbers(operator.or_, a, b)
    except TooMany:
        return ALL


def low_and_level(numbers: Numbers, dim: int) -> tuple[Numbers, Numbers]:
    """Flags: which numbers are low, and which of these are finite where all along the dimension are low."""
    low = numbers.mapped(lambda values: values <= LOW)
    finite = numbers.mapped(lambda values: (values <= LOW) & values.isfinite())
    return low, by_numbers(operator.and_, finite, low.all_along(dim)) if finite.any() else NONE


def share(flags: Numbers) -> Fraction:
    """The share of elements for which they are true."""
    return Fraction(flags.true(), flags.elements() or 1)


def equal_or_unknown(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(a == b, a, math.nan)


def by_elements(operation: Callable, args: tuple, kwargs: dict) -> torch.Tensor:
    """The result of an operation on single elements; elements that are alike are there once. Raises ValueError where
    there are more than LARGEST."""
    args, kwargs = tensor_trees.map_tensors((args, kwargs), once)
    sizes = torch.broadcast_shapes(*(one.shape for one in tensor_trees.input_tensors([args, kwargs])))
    if math.prod(sizes) > LARGEST:
        raise ValueError("too large")
    return operation(*args, **kwargs)


def decided(operation: Callable, args: tuple, kwargs: dict) -> torch.Tensor:
    """The result of an operation on numbers, NaN for unknown ones. What is added to a low number leaves it low, but for
    the opposite of a low number; zero times any number is zero."""
    result, name = operation(*args, **kwargs), operation.__name__
    both = [one for one in args[:2] if isinstance(one, torch.Tensor)]
    opens = [one.numel() == 1 and bool(one.isnan()) for one in both]  # the inputs decide all of it
    if name in ("add", "sub") and len(both) == 2:
        zeros = [torch.zeros_like(one) for one in both]
        pairs = ((both[0], zeros[1]), (zeros[0], both[1]))
        for alone in [operation(*pair, **kwargs) for pair, skip in zip(pairs, opens, strict=True) if not skip]:
            result = torch.where(result.isnan() & (alone <= LOW), alone, result)
        lows, highs = [one <= LOW for one in both], [one >= -LOW for one in both]
        if name == "sub":
            lows[1], highs[1] = highs[1], lows[1]
        opposite = (lows[0] & highs[1] | highs[0] & lows[1]) & result.isfinite()
        result = torch.where(opposite, math.nan, result)
    if name in ("mul", "div"):
        factors = zip(both, opens, strict=True) if name == "mul" else [(both[0], opens[0])]
        for one in [factor for factor, skip in factors if not skip]:
            result = torch.where(result.isnan() & (one == 0), 0.0, result)
    return result
