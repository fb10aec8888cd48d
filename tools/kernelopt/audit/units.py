"""Parsing and comparison of the numbers and units of hardware figures. All functions are pure.

A unit is canonical if a table below contains it. The units of one table convert into each other.
"""

import math
import re
from dataclasses import dataclass


class Pattern:
    """A regular expression that is compiled at its first use. The patterns of this package take 0.1 s to compile,
    and --help needs none of them."""

    def __init__(self, text: str, flags: int = 0):
        self.text, self.flags = text, flags

    def __getattr__(self, name: str):
        attribute = getattr(re.compile(self.text, self.flags), name)
        setattr(self, name, attribute)
        return attribute


RATES = {"bytes/s": 1e-9, "KB/s": 1e-6, "MB/s": 1e-3, "GB/s": 1.0, "TB/s": 1e3, "PB/s": 1e6} | {
    "KiB/s": 1024 / 1e9,
    "MiB/s": 2**20 / 1e9,
    "GiB/s": 2**30 / 1e9,
    "TiB/s": 2**40 / 1e9,
}
FLOPS = {"FLOPS": 1e-12, "KFLOPS": 1e-9, "MFLOPS": 1e-6, "GFLOPS": 1e-3, "TFLOPS": 1.0, "PFLOPS": 1e3}
# People also write these for rates.
WORK = {"FLOP": 1e-12, "KFLOP": 1e-9, "MFLOP": 1e-6, "GFLOP": 1e-3, "TFLOP": 1.0, "PFLOP": 1e3}
OPS = {"OPS": 1e-12, "GOPS": 1e-3, "TOPS": 1.0, "POPS": 1e3}
CLOCKS = {"MHz": 1.0, "GHz": 1e3}
POWER = {"W": 1.0, "kW": 1e3}
SIZES = {"bytes": 1.0} | {f"{prefix}{b}": 10.0 ** (3 * n) for n, prefix in enumerate("KMGT", 1) for b in ("B", "iB")}
INTENSITY = {"FLOP/byte": 1.0}
SINGLE = "SM CU threads warps wavefronts blocks registers lanes bit".split()  # each unit has its own table
TABLES = (RATES, FLOPS, WORK, OPS, CLOCKS, POWER, SIZES, INTENSITY, *({unit: 1.0} for unit in SINGLE))
TABLE_OF = {unit: table for table in TABLES for unit in table}
EXACT = 1e-6  # relative difference of two floats of one figure

# The spellings of units. A pattern has one group, the prefix, if the unit takes one.
_PREFIX = r"(kilo|mega|giga|tera|peta|gibi|tebi|mebi|kibi|[KMGTP]i|[kKMGTPmg])"
_BYTE = r"(?:[ -]?bytes?|B)"
_A_SECOND = r"(?:\s*(?:/|\bper\b|\ba\b|\beach\b)\s*s(?:ec(?:onds?)?)?\b|ps\b|\s?[·.*]?\s?s(?:⁻¹|\^\{?-1\}?))"
_OF_THEM = r"(?:(?:max(?:imum)?|resident|active|concurrent|hardware) )"
WRITTEN = (
    ("FLOP/byte", r"(?:FLOPs?|ops?|operations?)\s*(?:/|\bper\b)\s*(?:bytes?\b|B\b)"),
    ("bytes/s", rf"{_PREFIX}?{_BYTE}{_A_SECOND}"),
    ("FLOPS", rf"FLOPs?{_A_SECOND}|{_PREFIX}[ -]?(?:FLOPs?{_A_SECOND}|(?-i:FLOPS)\b|F{_A_SECOND}|(?-i:F)\b)"),
    ("FLOPS", r"(tera|peta|giga)[ -]?flops?\b|(?-i:(t|T|g|G|p|P)(?:flops|FlopS|Flops))\b"),
    ("FLOP", rf"(?-i:{_PREFIX}[ -]?(?:FLOPs?))\b|(?-i:FLOPS?)\b"),
    ("OPS", rf"{_PREFIX}[ -]?(?:OPs?{_A_SECOND}|OPS\b)"),
    ("Hz", r"(?:(mega|giga)hertz|([MG])Hz)\b"),
    ("W", r"(kilo)?watts?\b|(?-i:(k)?W)\b"),
    ("bytes", rf"{_PREFIX}{_BYTE}\b|bytes\b"),
    ("SM", r"(?-i:SMs?|SM's)\b|(?:streaming )?multi-?processors?\b"),
    ("CU", r"(?-i:CUs?)\b|compute units?\b"),
    ("threads", rf"{_OF_THEM}?(?:CUDA )?threads?\b"),
    ("warps", rf"{_OF_THEM}?warps?\b"),
    ("wavefronts", rf"{_OF_THEM}?wave(?:front)?s\b"),
    ("blocks", rf"{_OF_THEM}?(?:(?:thread )?blocks?|(?-i:CTAs?)|workgroups?)\b"),
    ("registers", rf"{_OF_THEM}?(?:32-bit )?(?:registers?|(?-i:VGPRs?)|regs)\b"),
    ("lanes", r"(?:fp32 |CUDA )?(?:lanes|cores)\b"),
    ("bit", r"bits?\b"),
)
# A rate of one card; a rate per SM or per watt is another quantity.
PER_CARD = r"(?:\s*(?:/|\bper\b|\ba\b)\s*(?:GPU|card|device|chip|board|accelerator|socket)\b)?"
UNIT = Pattern(
    "(?i:" + "|".join(f"(?P<u{at}>{pattern})" for at, (_, pattern) in enumerate(WRITTEN)) + f"){PER_CARD}(?!\\w)"
)
PER_OTHER = Pattern(r"\s?/\s?\w")
PER_SCOPE = Pattern(r"(?i)\s?/\s?(?:SMs?|CUs?|multi-?processor|threads?|blocks?|CTAs?|wavefront|workgroup)\b")
_SCALE = {"kilo": "K", "mega": "M", "giga": "G", "tera": "T", "peta": "P"}
_BINARY = {"kibi": "Ki", "mebi": "Mi", "gibi": "Gi", "tebi": "Ti"}

WORDS = {
    word: value
    for value, words in enumerate(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen".split()
    )
    for word in [words]
} | {word: 10 * tens for tens, word in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), 2)}
_MANY = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_word = "|".join([*WORDS, *_MANY])
SPELLED = rf"(?i:\b(?:an? (?=(?:{'|'.join(_MANY)})\b))?(?:{_word})(?:(?:[ -]| and | point )(?:{_word})){{0,8}}\b)"
DIGITS = (
    r"0[xX][0-9a-fA-F]+|"
    r"(?:\d{1,3}(?:[,_' ]\d{3})+|\d+)(?:\.\d+)?(?:[eE][+-]?\d+)?(?:\s?(?:[x×·*]|\\times)\s?10(?:\^|\*\*)\{?\d+\}?)?"
)


@dataclass(frozen=True)
class Number:
    """A number as written. step: half a unit of its last significant digit. digits: the number of significant
    digits. Trailing zeros of a whole number are not significant."""

    value: float
    digits: int
    step: float


def number(text: str) -> float | None:
    """Return 1979.5 for "1,979.5", 132 for "0x84", and None for anything else."""
    parsed = read_number(text)
    return parsed.value if parsed and re.fullmatch(DIGITS, text) else None


def read_number(text: str) -> Number | None:
    """Parse a number in digits or in words. Return None if the text is not a number."""
    if text[:1].isdigit():
        return _from_digits(text) if re.fullmatch(DIGITS, text) else None
    return _from_words(text.lower())


def _from_digits(text: str) -> Number:
    if text[:2].lower() == "0x":
        value = float(int(text, 16))
        return Number(value, len(str(int(value)).rstrip("0")) or 1, 0.5)
    power = re.search(r"(?:[x×·*]|\\times)\s?10(?:\^|\*\*)\{?(\d+)\}?$", text)
    plain = re.sub(r"[,_' ]", "", text[: power.start()] if power else text)
    shift = min(int(power[1]), 300) if power else 0
    mantissa, _, exponent = plain.lower().partition("e")
    shift += max(-300, min(int(exponent), 300)) if exponent else 0
    whole, _, decimals = mantissa[:300].partition(".")
    counting = (whole + decimals).lstrip("0")
    last = -len(decimals)
    if not decimals:
        last = len(whole) - len(whole.rstrip("0"))
        counting = counting.rstrip("0")
    return Number(float(mantissa[:300]) * 10.0**shift, len(counting) or 1, 0.5 * 10.0 ** (last + shift))


def _from_words(text: str) -> Number | None:
    """4.8 for "four point eight", 132 for "a hundred and thirty-two"."""
    whole, _, decimals = re.sub(r"-", " ", text).partition(" point ")
    total = part = 0.0
    for word in whole.split():
        if word in WORDS:
            part += WORDS[word]
        elif word == "hundred":
            part = (part or 1) * 100
        elif word in _MANY:
            total, part = total + (part or 1) * _MANY[word], 0.0
        elif word not in ("a", "an", "and"):
            return None
    value = total + part
    tail = "".join(str(WORDS.get(word, "")) for word in decimals.split())
    if tail:
        return Number(value + float(f"0.{tail}"), len(f"{value:g}{tail}".lstrip("0")), 0.5 * 10.0 ** -len(tail))
    return Number(value, len(f"{value:.0f}".rstrip("0")) or 1, 0.5)


def unit_at(text: str, at: int) -> tuple[str, int] | None:
    """Return (canonical unit, end) of the unit at a position, or None. A count or a size may be per SM; a rate may
    not."""
    match = UNIT.match(text, at)
    if match is None:
        return None
    unit = unit_of(match)
    per = PER_OTHER.match(text, match.end())
    if per and not (TABLE_OF[unit] is SIZES or (unit in SINGLE and PER_SCOPE.match(text, match.end()))):
        return None
    return unit, match.end()


def unit_of(match: re.Match) -> str:
    """Return the canonical unit of a match of UNIT."""
    at = next(index for index in range(len(WRITTEN)) if match[f"u{index}"])
    name, text = WRITTEN[at][0], match[f"u{at}"]
    if name in SINGLE or name == "FLOP/byte":
        return name
    prefix = _prefix(text, name)
    if name == "Hz":
        return f"{prefix}Hz"
    if name == "W":
        return "kW" if prefix == "K" else "W"
    if name in ("bytes", "bytes/s"):
        return f"{prefix}B{name[5:]}" if prefix else name
    return f"{prefix}{name}"


def _prefix(text: str, name: str) -> str:
    lower = text.lower()
    for words in (_SCALE, _BINARY):
        for word, short in words.items():
            if lower.startswith(word):
                return short
    if re.match(r"bytes?|b\b|flops?\b", lower) or (name == "W" and not lower.startswith("k")):
        return ""
    short = text[0].upper()
    return f"{short}i" if text[1:2] == "i" and short in "KMGT" else short


def canonical(unit: str) -> str | None:
    """Return the canonical unit of a text that is exactly one unit: TFLOPS for "TF/s". Return None otherwise."""
    if unit in TABLE_OF:
        return unit
    parsed = unit_at(unit.strip(), 0)
    return parsed[0] if parsed and parsed[1] == len(unit.strip()) else None


def convertible(unit: str, other: str) -> bool:
    """Return whether two canonical units convert into each other."""
    return unit == other or (unit in TABLE_OF and TABLE_OF[unit] is TABLE_OF.get(other))


def converted(value: float, unit: str, other: str) -> list[float]:
    """Convert a figure to another unit of its table. A size gives two results, for steps of 1000 and of 1024."""
    if unit == other:
        return [value]
    table = TABLE_OF[unit]
    ratio = table[unit] / table[other]
    if table is not SIZES:
        return [value * ratio]
    steps = round(abs(math.log(ratio, 1000)))
    binary = 1.024 ** (steps if ratio > 1 else -steps)
    return [value * ratio, value * ratio * binary]


def equal(value: float, unit: str, other: float, other_unit: str, within: float = EXACT) -> bool:
    """Return whether two figures in convertible units differ by at most `within`, relative to the larger one."""
    return any(close(candidate, other, within) for candidate in converted(value, unit, other_unit))


def close(a: float, b: float, within: float) -> bool:
    return abs(a - b) <= within * max(abs(a), abs(b))
