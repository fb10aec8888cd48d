"""Makes the cases of a reference: the inputs of a workload, seed and variant, with the parameters."""

from dataclasses import replace

from ..case_types import Draws, Variant
from . import problem, reference_runs, sampling, size_trials, variant_inputs, variants
from .drawn_values import OtherDraws, free_numbers


class CaseMaker:
    """Makes cases of a reference; the last one is kept, since variants are cut out of it."""

    def __init__(self, loaded: problem.Reference, dtype: str | None, device: str):
        self.loaded, self._dtype, self.device = loaded, dtype, device
        self._last: tuple = (None, None)
        self.declarations = loaded.declarations

    def samples(self, case: problem.Case, variant: Variant | None) -> list[Draws]:
        """The outputs of a case that are drawn at random, over many seeds on the task's own inputs and with other
        numbers among them, over few at one other set of sizes and with unequal rows, and not at all on other
        variants."""
        many = variant is None or variant.values == variant_inputs.OTHER_NUMBERS
        few = variant and (variant.name == variants.JUST_BELOW or variant.values == variant_inputs.UNEQUAL_ROWS)
        if not self.declarations.samples or not (many or few):
            return []
        probabilities = reference_runs.outputs(self.loaded, case, self.device)
        return [
            Draws(at, one.seed, sampling.calls_needed(one, probabilities[at], self.device, own=many))
            for at, one in self.declarations.samples.items()
            if at < len(probabilities)
        ]

    def held(self, workload: str, seed: int, variant: Variant) -> size_trials.Held | None:
        """What a variant of keyword sizes holds, by shapes alone; None where shapes do not tell."""
        return size_trials.held(self.loaded, workload, seed, self._dtype, variant.keywords)

    def case(self, workload: str, seed: int, variant: Variant | None = None, other: int = 0) -> problem.Case:
        """The inputs and parameters of a seed, made or cut to the sizes of a variant. other: the number of other
        contents of these sizes, 0 for its own."""
        keywords = variant.keywords if variant else {}
        if keywords and other:
            seed, other = seed + other, 0
        by_keywords = bool(self.loaded.sizes[workload])
        drawn = variant.values if variant and by_keywords and variant.values in variant_inputs.VALUES else None
        key = workload, seed, tuple(keywords.items()), drawn
        if self._last[0] != key:
            self._last = (None, None)  # so that two do not lie in memory
            within = OtherDraws(drawn) if drawn else None
            self._last = key, self.loaded.case(workload, seed, self._dtype, self.device, keywords, within)
        if not variant:
            return self._last[1]
        rest = replace(variant, values=None) if drawn else variant
        made = variant_inputs.of_case(self._last[1], rest, other)
        if variant.values == variant_inputs.UNEQUAL_ROWS:
            another = self.loaded.case(workload, seed + 1, self._dtype, self.device, keywords)
            another = variant_inputs.of_case(another, rest, other)
            made = made.with_inputs(variant_inputs.unequal(made.inputs, another.inputs))
        return made.with_inputs(self._other_numbers(made.inputs, workload, keywords, variant.values))

    def _other_numbers(self, inputs: list, workload: str, keywords: dict[str, int], values: str | None) -> list:
        """The inputs, with the seeds or floating numbers that a variant wants."""
        if values == variant_inputs.OTHER_SEED:
            seeds = self.declarations.seeds()
            return [variant_inputs.reseeded(value) if at in seeds else value for at, value in enumerate(inputs)]
        if values == variant_inputs.OTHER_NUMBERS:
            free = free_numbers(self.loaded, workload, self._dtype, keywords)
            return variant_inputs.other_numbers(inputs, free)
        return inputs
