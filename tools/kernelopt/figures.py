"""Figures of hardware in a text: what number in what unit, of which quantity, and what is said about it. Pure.

A text is read as one piece: a paragraph, a table's row, a comment. Markup and typography are levelled first, each character
by one or by spaces, so that places in the levelled text are places in the text as it was.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from .units import CLOCKS, DIGITS, FLOPS, OPS, POWER, RATES, SPELLED, Number, read_number, unit_at

# --- one spelling for what is written in many ways -----------------------------------------------------------------

SPACES = dict.fromkeys(map(ord, "\u00a0\u2007\u2008\u2009\u200a\u200b\u202f\u2060\u3000\ufeff`$\u0000"), " ")
DASHES = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2212"), "-")
TYPOGRAPHY = SPACES | DASHES | {ord("\u2019"): "'"}
MARKUP = re.compile(
    r"&(?:nbsp|thinsp|ensp|emsp|#160|#8239|#xA0);|</?(?:b|i|em|strong|code|sub|sup|span|br|td|th|tr|u|kbd)\b[^<>\n]{0,80}>"
    r"|\\(?:text(?:bf|rm)?|math(?:rm|bf))\{|(?<=\w)\}|\\[,;: ]|(?<=\d)~(?=[A-Za-z\\])"
    r"|\*{2,3}|~~|(?<![\w*])\*(?=\w)|(?<=\w)\*(?![\w*])|(?<!\w)_{1,2}(?=\w)|(?<=[\w%])_{1,2}(?!\w)",
    re.IGNORECASE,
)
PLAIN = re.compile(r"[\w .,;:()%+/='\n>-]*", re.ASCII)
DASH_MARKUP = re.compile(r"&[nm]dash;|(?<=\d)--(?=\d)")


def level(text: str) -> str:
    """The text without markup, entities and typography, each of them replaced by as many characters."""
    if PLAIN.fullmatch(text):
        return text
    text = DASH_MARKUP.sub(lambda match: "-".ljust(len(match[0])), text.translate(TYPOGRAPHY))
    return MARKUP.sub(lambda match: " " * len(match[0]), text)


# --- names of devices ----------------------------------------------------------------------------------------------

_brand = r"(?:NVIDIA|AMD|Tesla|Quadro|GeForce|GRID|Radeon|Instinct|Jetson|DGX|HGX|TITAN|Titan)"
_model = (
    r"(?:RTX(?: PRO)? ?A?\d{3,4}|GTX ?\d{3,4}|[GM]X? ?\d{3,4}M?|RX ?\d{4}|GH\d{3}|GB\d{2,3}|GV\d{3}|MI\d{2,3}[AX]?|T\d{3,4}|T4G?|"
    r"[ABHVPKM]\d{2,3}[A-Z]?|A[1-9]|L(?:4|20|40)[A-Z]?)"
)
_suffix = (
    r"(?:Ti|SUPER|Super|Laptop|Mobile|GPU|GPUs|Max-Q|with|Design|Ada|Generation|Blackwell|Workstation|Server|Edition|SFF|SXM\d?|"
    r"DGXS|PCI[eE]|NVL|OAM|AC|HF|VF|D|H|N|3e|XT|XTX|Xp|V|MIG|(?:\d+c\.)?\d+g\.\d+gb(?:\+[\w.]+)?|\d+[CQB]|"
    r"\d+ ?G(?:i?B)?(?! ?/| of|ps)(?: ?(?:HBM|GDDR)\d\w?)?)"
)
NAME = re.compile(
    rf"\b(?:{_brand}(?:[ -]{_brand})*(?:[ -](?:{_model}|RTX|PG\d+-\d+|Graphics Device|Display|Orin|Thor|Xavier|CMP \w+|\d{{4}}\w*|[A-Z]{{1,3}}\d+\w*)"
    rf"(?:/\w+)?)?|{_model})(?:[ -]{_suffix})*(?![\w/])"
)
DEVICE_MARK = "\x01"  # stands where a name was


def blank_names(text: str, devices: re.Pattern | None) -> str:
    """The text with the names of devices marked. devices: those that programs recorded, and the wiki's own."""
    if devices:
        text = devices.sub(lambda match: DEVICE_MARK * len(match[0]), text)
    return NAME.sub(lambda match: DEVICE_MARK * len(match[0]), text)


def pattern_of_names(names) -> re.Pattern | None:
    """A pattern for these very names, whatever their case, the longest first; None of none."""
    ordered = sorted((re.escape(name) for name in names if name), key=len, reverse=True)
    return re.compile(rf"(?i)(?<![\w-])(?:{'|'.join(ordered)})(?![\w/])") if ordered else None


# --- quantities ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quantity:
    """What a figure can be of. metrics: the wiki's rows; words: how prose and identifiers call it; units: what a bare
    number of it may be in."""

    name: str
    metrics: re.Pattern = field(repr=False)
    words: re.Pattern = field(repr=False)
    units: tuple[str, ...] = field(repr=False)


def _quantity(name: str, metrics: str, words: str, units: str) -> Quantity:
    return Quantity(
        name, re.compile(metrics), re.compile(rf"(?i)(?<![^\W_])(?:{words})(?![^\W_])"), tuple(units.split())
    )


QUANTITIES = (
    _quantity("link", r"nvlink\w*|infinity_fabric\w*", r"nv-?link\w*|c2c|infinity[ _]fabric|xgmi", "GB/s TB/s bytes/s"),
    _quantity(
        "bandwidth",
        r"memory_bandwidth|measured_\w+_bandwidth",
        r"(?:mem|hbm|dram|peak|copy)?(?:bandwidth|bw)|[gt]bps|[gt]b/s",
        "GB/s TB/s bytes/s",
    ),
    _quantity(
        "compute",
        r"peak_\w+|measured_\w+_matmul",
        r"(?:peak_?)?(?:[gtp]?flops|tops)|tensor[ _](?:peak|rate|throughput)|peak[ _](?:fp|bf|tf|int)\d+\w*",
        "TFLOPS TOPS FLOPS OPS PFLOPS",
    ),
    _quantity("clock", r"boost_clock|memory_clock", r"\w*clock\w*|mhz|ghz|frequency|freq", "MHz GHz"),
    _quantity("power", r"tdp", r"tdp|power|watts?", "W"),
    _quantity("L2", r"l2_capacity", r"l2", "MB KB bytes"),
    _quantity("infinity cache", r"infinity_cache_capacity", r"infinity[ _]cache|mall|llc", "MB bytes"),
    _quantity("L1", r"l1\w*", r"l1", "KB bytes"),
    _quantity("shared memory", r"shared_memory\w*", r"(?:max)?(?:shared|smem|shmem|sharedmem)", "KB bytes"),
    _quantity("LDS", r"lds\w*", r"lds|local data share", "KB bytes"),
    _quantity("register file", r"vgpr_file\w*", r"(?:register|vgpr)[ _]files?", "KB bytes"),
    _quantity(
        "memory",
        r"memory_capacity",
        r"hbm\w*|gddr\w*|vram|dram|(?:device|gpu|global|total|video|onboard|board|main)[ _]?mem(?:ory)?|mem(?:ory)?",
        "GB bytes",
    ),
    _quantity("bus", r"memory_bus_width", r"bus\w*|hbm\w*|gddr\w*", "bit"),
    _quantity(
        "multiprocessors",
        r"sm_count|cu_count",
        r"k?(?:num|n|nr|no|number|total|max|all)?[_ ]?(?:of[_ ])?(?:sms|cus)|(?:num|n|nr|number|total|max)[_ ](?:of[_ ])?(?:sm|cu)|"
        r"(?:sm|cu)[_ ]?(?:count|num|number|nr|total)s?|\w*multi[_ -]?processors?(?:[_ ]?count)?|compute[_ ]units?",
        "SM CU",
    ),
    _quantity("warp size", r"warp_size|wavefront_size", r"(?:warp|wavefront|wave)[_ ]?size", "threads"),
    _quantity("registers", r"registers_\w+|vgprs_\w+", r"registers?|regs?|vgprs?", "registers"),
    _quantity("threads", r"threads_\w+", r"threads?", "threads"),
    _quantity("warps", r"warps_per_sm|wavefronts_per_cu", r"warps?|wave(?:front)?s", "warps wavefronts"),
    _quantity("blocks", r"blocks_per_sm|workgroups_per_cu", r"blocks|ctas|workgroups", "blocks"),
    _quantity("lanes", r"fp32_lanes_per_sm", r"lanes|(?:cuda[_ ])?cores", "lanes"),
)
BY_NAME = {quantity.name: quantity for quantity in QUANTITIES}
MEASURABLE = {"link", "bandwidth", "compute", "clock", "power"}  # a program can measure such a figure
# Of which quantity a figure is by its unit alone. A size or a count of threads needs words.
BY_TABLE = {id(RATES): "bandwidth", id(FLOPS): "compute", id(OPS): "compute", id(CLOCKS): "clock", id(POWER): "power"}
COUNTED = {
    "SM": "multiprocessors",
    "CU": "multiprocessors",
    "threads": "threads",
    "warps": "warps",
    "wavefronts": "warps",
    "blocks": "blocks",
    "registers": "registers",
    "lanes": "lanes",
    "bit": "bus",
}
LIMITS = {"registers", "threads", "warps", "blocks", "lanes"}  # of an SM, a block or a thread

_sm = r"(?:SMs?|CUs?|multi-?processors?|compute[ _]units?)"
_each = r"(?:/ ?|(?:\b(?:per|an?|each|every)|_per)[ _])"
SCOPES = {
    "sm": re.compile(rf"(?i)(?:{_each}|\b(?:one|the|in|on|of) ){_sm}\b|_per_(?:sm|cu)(?![^\W_])"),
    "block": re.compile(rf"(?i){_each}(?:thread[ _]?)?(?:block|cta|workgroup)(?![^\W_])"),
    "thread": re.compile(rf"(?i){_each}(?:thread|wavefront|lane)(?![^\W_])"),
}
SCOPE_REACH = 40  # characters between a figure and the words that say of what
METRIC_SCOPE = (
    ("_per_sm", "sm"),
    ("_per_cu", "sm"),
    ("_per_block", "block"),
    ("_per_workgroup", "block"),
    ("_per_thread", "thread"),
)


def scope_of(figure: "Figure") -> str | None:
    """Whether it is a figure of an SM, of a block or of a thread, by the nearest words beside it."""
    found = []
    for scope, pattern in SCOPES.items():
        found += [(len(figure.before) - match.end(), scope) for match in pattern.finditer(figure.before)]
        found += [(match.start(), scope) for match in pattern.finditer(figure.after)]
    return min(((far, scope) for far, scope in found if far <= SCOPE_REACH), default=(0, None))[1]


def scope_of_metric(metric: str) -> str | None:
    return next((scope for suffix, scope in METRIC_SCOPE if suffix in metric or metric.endswith(suffix)), None)


# --- what is said of a figure --------------------------------------------------------------------------------------

CUES = {
    # the vendor's figure: nobody measures it
    "documented": r"vendor\w*|manufacturer|data ?sheets?|spec(?:s|ifications?|ified)?(?: sheet)?|white ?paper|documented|documentation|"
    r"documents?|official\w*|nominal\w*|advertised|rated|theoretical\w*|on paper|marketing|brochure|nameplate|product page|"
    r"(?:nvidia|amd) (?:says|claims|states|lists|quotes|promises)|promise[sd]?|according to (?:nvidia|amd)",
    # the most that the hardware gives
    "peak": r"peaks?(?!ed)|max(?:imum|imal)?\.?|theoretical|hardware limit|boost|tdp|power (?:limit|cap)|line rate|full (?:rate|bandwidth|speed)",
    # the most that fits
    "limit": r"at least|more than|most|can(?:not)?|may|must|allow\w*|capacity|holds?|has|have|support\w*|fits?|budget|available|addressable|"
    r"at most|up to|no more than|limit(?!s |ed|ing|er)|max(?:imum|imal)?|caps?|ceiling|opt-?in",
    # somebody speaks of the device
    "device": rf"{DEVICE_MARK}+|(?:the|this|our|a|an|that|each|every|one|whole|per|same|other|of) (?:\w+ )?"
    r"(?:card|gpu|device|chip|board|part|accelerator|hardware|machine|die|silicon)s?|(?:card|gpu|device|chip|board|hardware|machine)(?:'s|s')",
    # a run reached it, or reaches it
    "ran": r"achieved|reached|attained|got|gave|sustained|ran|hit|clocked|observed|seen|averaged|came to|drew|drawn|fell|dropped|rose|"
    r"climbed|went|stayed|stood|sat|median|timed|profiled|counted|recorded",
    "runs": r"achieves?|reach(?:es)?|attains?|gets?|gives?|sustains?|runs?|running|hits|comes to|draws?|falls?|drops?|rises?|climbs?|goes|"
    r"stays?|stands?|sits?|measured|measures?",
    "most": r"at most|up to|no more than|limit(?!s |ed|ing|er)|max(?:imum|imal)?|caps?|ceiling|capacity|hard(?:ware)? (?:cap|limit)|opt-?in",
    # a run could reach it, which says nothing of a run
    "modal": r"can(?:not|'t)?|could|would|should|might|may|never|will|must",
    # data and work, not the device
    "data": r"reads?|written|writes?|wrote|load\w*|stor(?:e|es|ed|ing)|mov(?:es?|ed|ing)|traffic|fetch\w*|spill\w*|flush\w*|buffers?|"
    r"tensors?|tiles?|stages?|matri(?:x|ces)|inputs?|outputs?|operands?|workspace|scratch|batch\w*|allocat\w+|us(?:es?|ed|ing)|tak(?:es?|ing)|"
    r"needs?|asks?|wants?|fell|falls?|rose|rises?|dropp?\w*|in flight|apart|hits?|miss\w*|saved|cop(?:y|ies|ied)|bytes|footprint|"
    r"working set|kernels?|launch\w*|grid|programs?|compiler|ptxas|spilled|compiled|occupied|resident|occupancy|v\d+|rows?|elements?|idle|busy",
}  # fmt: skip
CUE = {name: re.compile(rf"(?i)(?<![\w-])(?:{words})(?![\w])") for name, words in CUES.items()}
# "92 % of peak" speaks of the percentage, not of the figure that stands beside it.
SHARE = re.compile(
    r"(?i)(?P<pct>\d+(?:\.\d+)?)\s?(?:%|percent|per cent) of (?:\w+'s |[a-z]+ |" + DEVICE_MARK + r"+(?:'s)? ){0,4}?"
    r"(?:peaks?|roofs?|bandwidth|maximum|max|rate|floor|limit|tdp|throughput|figure|value)\b"
)
WORK = re.compile(r"(?i)\bof (?:work|arithmetic|compute)\b|\b(?:per|a|each|in) (?:call|step|pass|launch|forward|iteration|token)\b|\bin (?:all|total)\b|"
                  r"\b(?:needs?|costs?|counts?|takes?|does|do|counted|performs?|work|total)\b")  # fmt: skip
POWER_WORDS = re.compile(r"(?i)\b(?:power|tdp|dr[ea]w\w*|cap(?:ped|s)?|watts?|limit\w*|consum\w+|thermal|throttl\w+|budget|board|part|card|gpu|envelope)\b")  # fmt: skip
RIDGE = re.compile(
    r"(?i)\bridge(?:[ _-]?point)?s?\b(?: of (?:the|this) \w+)?[\s:=,\"'*]*(?:(?:is|lies|sits|of|at|near|about|around|would|be|comes|to|value|=)\s*)*$"
)
CLAUSE = re.compile(r"[.;!?|](?=\s|$)|\n\s*\n")
REACH = 70  # characters to either side of a figure that can speak of it

NUM = rf"(?<![\w.#^@/\\])(?<![\w.]-)(?:{DIGITS})"
AND = r"\s*(?:-|/|…|\.{2,3}|\bto\b|\band\b|\bor\b|\bthrough\b)\s*"
NUMBERS = re.compile(rf"{NUM}(?:{AND}(?:{DIGITS}))*|{SPELLED}")
ONE = re.compile(rf"(?:{DIGITS})|{SPELLED}")
NAME_BEFORE = re.compile(r"[A-Z]\w*\s$")
GAP = re.compile(r"[ \t\n]{0,8}(?:-[ \t\n]{0,2})?")
KEY = re.compile(
    r"(?:[\w./' -]|\((?=[^()\n]{0,20}\)))[^\n\d;|]{0,40}?(?P<link>[\"']?\s*(?:[:=(]|\bof\b|\bis\b|\bare\b|\bwas\b|\bat\b)\s*[\"'({\[]*)$"
)


@dataclass(frozen=True)
class Figure:
    """A number, what it may be in (unit: the one that was written, None for a bare number), and the words around it.

    before, after: to the clause's end, the next figure or REACH characters; clause: what surrounds it, figures too; label: of a bare number, what names it.
    start, end: its place in the text.
    """

    number: Number
    unit: str | None
    start: int
    end: int
    before: str = field(repr=False)
    after: str = field(repr=False)
    clause: str = field(repr=False)
    shared: tuple[bool, bool] = (False, False)  # does another figure stand at the far end of before, of after?
    label: str | None = None
    share: float | None = None  # the percentage that is said to be of a peak or rate in the same clause

    def says(self, cue: str, near: int = REACH) -> bool:
        """Is it said of this figure, in `near` characters of it, rather than of the figure beside it?"""
        for match in CUE[cue].finditer(self.before):
            gap = len(self.before) - match.end()
            if gap <= near and not (self.shared[0] and _nearer(self.before, match.start(), match.end())):
                return True
        for match in CUE[cue].finditer(self.after):
            theirs = self.shared[1] and not _nearer(self.after, match.start(), match.end())
            if match.start() <= near and not theirs:
                return True
        return False

    @property
    def around(self) -> str:
        return f"{self.before} \x02 {self.after}"


ONE_EACH = re.compile(
    rf"(?i)\bone (?:program |block |cta )?(?:per|for (?:each|every)|on (?:each|every)|an?|each) (?:of the )?{_sm}"
)
SEPARATOR = re.compile(r"[,:()]|\b(?:and|but|while|where|against|of)\b")


def _nearer(gap: str, start: int, end: int) -> bool:
    """Does a word between two figures belong to the one before it? A comma decides, or else the distance."""
    before, after = SEPARATOR.search(gap[:start]), SEPARATOR.search(gap[end:])
    if bool(before) != bool(after):
        return after is not None
    return start < len(gap) - end


CAMEL = re.compile(r"(?<=[a-z\d])(?=[A-Z])|_")


def figures(text: str, label: str = "", unit_of_label: str | None = None) -> list[Figure]:
    """The figures of a levelled text in which names are blank. label: what a key or a table's head says of a bare number in
    it, unit_of_label: the unit that stands there."""
    label = CAMEL.sub(" ", level(label))
    shares = list(SHARE.finditer(text))
    spoken = SHARE.sub(lambda match: " " * len(match[0]), text)
    found = list(_numbers(spoken))
    made = []
    for at, (number, unit, start, end) in enumerate(found):
        left = found[at - 1][3] if at else 0
        right = found[at + 1][2] if at + 1 < len(found) else len(text)
        before, after = spoken[max(left, start - REACH) : start], spoken[end : min(right, end + REACH)]
        before_cut, after_cut = CLAUSE.split(before)[-1], CLAUSE.split(after)[0]
        shared = (at > 0 and left > start - REACH and len(before_cut) == len(before),
                  at + 1 < len(found) and right < end + REACH and len(after_cut) == len(after))  # fmt: skip
        unit = unit or (unit_of_label if label else None)
        name = label or (CAMEL.sub(" ", _key(before_cut) or "") if unit is None else "")
        if label:
            before_cut = f"{label} = {before_cut}"
        if unit is not None or name:
            share = next((float(m["pct"]) for m in shares if _together(text, m, start, end)), None)
            clause = (
                CLAUSE.split(spoken[max(0, start - REACH) : start])[-1]
                + "\x02"
                + CLAUSE.split(spoken[end : end + REACH])[0]
            )
            made.append(Figure(number, unit, start, end, before_cut, after_cut, clause, shared, name or None, share))
    return made


def _together(text: str, share: re.Match, start: int, end: int) -> bool:
    """Do a share and a figure stand in one clause?"""
    low, high = min(share.end(), end), max(share.start(), start)
    return high - low <= REACH and not CLAUSE.search(text, low, high)


def _numbers(text: str) -> Iterator[tuple[Number, str | None, int, int]]:
    """(number, unit, start, end) of all numbers; those of a range share the unit of its last one."""
    for group in NUMBERS.finditer(text):
        unit, end = _unit_after(text, group.end())
        if (
            unit is None
            and text[group.end() : group.end() + 1] in "kK"
            and (beyond := _unit_after(text, group.end() + 1))[0] in COUNTED
        ):
            thousand = read_number(group[0])  # 64K registers
            if thousand:
                yield replace(thousand, value=1024 * thousand.value), *beyond[:1], group.start(), beyond[1]
            continue
        if unit is None and text[group.end() : group.end() + 1].isalnum():
            continue  # part of a word
        ones = list(ONE.finditer(text, group.start(), group.end()))
        for one in ones:
            start = one.start()
            if " " in one[0] and one[0][0].isdigit() and NAME_BEFORE.search(text, max(0, start - 20), start):
                start = one[0].index(" ") + start + 1  # "NVLink 4 900 GB/s"
            number = read_number(text[start : one.end()])
            if number and (unit or one[0][0].isdigit()):
                yield number, unit, start, end if one is ones[-1] else one.end()


def _unit_after(text: str, at: int) -> tuple[str | None, int]:
    return unit_at(text, GAP.match(text, at).end()) or (None, at)


def _key(before: str) -> str | None:
    """What names a bare number: "SM count" of "with an SM count of 132", "num_sms" of '"num_sms": 132'."""
    if RIDGE.search(before):
        return "ridge point"
    match = KEY.search(before)
    return before[match.start() : match.start("link")] if match else None


# --- sizes: a size is the hardware's only where the words beside it say so -------------------------------------------

_size_names = ("infinity cache", "L2", "L1", "shared memory", "LDS", "register file", "memory")
OF = re.compile(
    r"(?i)[\s)\]]*(?:(?:of|the|its|an?|on-chip|on|unified|total|fast|large|big|dedicated|last-level|hardware|dynamic|static)\b[\s-]*)*"
)
LINK = re.compile(
    r"(?i)(?:[\s:=(\[,'\"·•/|+]|->|\b(?:cache|memory|mem|capacity|size[sd]?|is|was|are|has|have|of|holds?|with|at|only|just|be|offers?|gives?|"
    r"provides?|per|an?|the|its|each|every|sms?|cus?|block|cta|about|roughly|approximately|around|nearly|almost|max(?:imum)?|limit|total|"
    r"up to|amounts? to|comes? (?:to|with)|most|stack|chips?|card|gpu|device|that|large|kb|mb|gb|bytes)\b)*"
)
DATA_BEFORE = re.compile(
    r"(?i)(?<!can )(?<!may )(?<!cannot )\b(?:us(?:es?|ed|ing)|needs?|tak(?:es?|ing)|asks? for|allocat\w+|occup\w+|reads?|writes?|wrote|mov(?:es?|ed)|loads?|fetch\w*|"
    r"spill\w*|stores?|cop(?:y|ies|ied)|keeps?|kept|fills?|touch\w*|streams?|sends?|wants?|blocks? of|programs? of|traffic|flush\w*(?: with)?)"
    r"\s+(?:up to |about |only |over |around |another |at most |a |an |just )*$"
)
DATA_AFTER = re.compile(
    r"(?i)^[\s)]*(?:of \w+ )?(?:(?:are|is|were|was|have been|has been) )?(?:read|written|moved|loaded|stored|used|allocated|spilled|fetched|"
    r"buffers?|tensors?|tiles?|stages?|workspace|scratch|traffic|in flight|apart|in use|a stage|a program|a tile|each)\b"
)
DATA_NOUN = re.compile(
    r"(?i)^[\s-]*(?:traffic|reads?|writes?|accesses|bytes|transactions|bandwidth|sectors|hits?|misses|requests)\b"
)


def sizes_of(figure: Figure) -> list[str]:
    """Of which memories a size is the capacity, by the words beside it; none where data is spoken of."""
    named = [BY_NAME[name] for name in _size_names]
    if figure.label:
        return [quantity.name for quantity in named if quantity.words.search(figure.label)]
    if DATA_BEFORE.search(figure.before) or DATA_AFTER.match(figure.after):
        return []
    at = OF.match(figure.after).end()
    for quantity in named:
        match = quantity.words.match(figure.after, at)
        if match and not DATA_NOUN.match(figure.after[match.end() :]):
            return [quantity.name]
    for quantity in named:
        for match in quantity.words.finditer(figure.before):
            if LINK.fullmatch(figure.before, match.end()):
                return [quantity.name]
    if figure.says("most", SCOPE_REACH) or scope_of(figure):  # "shared memory: 228 KB per SM and 227 KB per block"
        return [quantity.name for quantity in named if quantity.words.search(figure.clause)]
    return []
