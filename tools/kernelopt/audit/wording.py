"""The words that people use for hardware: typography, card names, quantities, and the words around a figure. All
functions are pure.

`level` replaces each character by one character, so positions in the levelled text are positions in the original.
"""

import re
from dataclasses import dataclass, field

from .units import CLOCKS, FLOPS, OPS, POWER, RATES, Pattern

# --- one spelling for each of many variants ------------------------------------------------------------------------

SPACES = dict.fromkeys(map(ord, "\u00a0\u2007\u2008\u2009\u200a\u200b\u202f\u2060\u3000\ufeff`$\u0000"), " ")
DASHES = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2212"), "-")
TYPOGRAPHY = SPACES | DASHES | {ord("\u2019"): "'"}
MARKUP = Pattern(
    r"&(?:nbsp|thinsp|ensp|emsp|#160|#8239|#xA0);|</?(?:b|i|em|strong|code|sub|sup|span|br|td|th|tr|u|kbd)\b[^<>\n]{0,80}>"
    r"|\\(?:text(?:bf|rm)?|math(?:rm|bf))\{|(?<=\w)\}|\\[,;: ]|(?<=\d)~(?=[A-Za-z\\])"
    r"|\*{2,3}|~~|(?<![\w*])\*(?=\w)|(?<=\w)\*(?![\w*])|(?<!\w)_{1,2}(?=\w)|(?<=[\w%])_{1,2}(?!\w)",
    re.IGNORECASE,
)
PLAIN = Pattern(r"[A-Za-z0-9 .,;:()%+/='\n>-]*")
DASH_MARKUP = Pattern(r"&[nm]dash;|(?<=\d)--(?=\d)")


def level(text: str) -> str:
    """Replace markup, entities and typography. The text keeps its length."""
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
    r"DGXS|PCI[eE]|(?:HBM|GDDR)\d\w?|NVL|OAM|AC|HF|VF|D|H|N|3e|XT|XTX|Xp|V|MIG|(?:\d+c\.)?\d+g\.\d+gb(?:\+[\w.]+)?|\d+[CQB]|"
    r"\d+ ?G(?:i?B)?(?! ?/| of|ps)(?: ?(?:HBM|GDDR)\d\w?)?)"
)
NAME = Pattern(
    rf"\b(?:{_brand}(?:[ -]{_brand})*(?:[ -](?:{_model}|RTX|PG\d+-\d+|Graphics Device|Display|Orin|Thor|Xavier|CMP \w+|\d{{4}}\w*|[A-Z]{{1,3}}\d+\w*)"
    rf"(?:/\w+)?)?|{_model})(?:[ -]{_suffix})*(?![\w/])"
)
DEVICE_MARK = "\x01"  # stands where a name was


def blank_names(text: str, devices: Pattern | None) -> str:
    """Mark the names of devices. devices: the wiki's names and the names that programs recorded."""
    if devices:
        text = devices.sub(lambda match: DEVICE_MARK * len(match[0]), text)
    return NAME.sub(lambda match: DEVICE_MARK * len(match[0]), text)


def pattern_of_names(names) -> Pattern | None:
    """Return a case-insensitive pattern for exactly these names, longest first. Return None if there are no names."""
    ordered = sorted((re.escape(name) for name in names if name), key=len, reverse=True)
    return Pattern(rf"(?i)(?<![\w-])(?:{'|'.join(ordered)})(?-i:(?:[ -]{_suffix})*)(?![\w/])") if ordered else None


CAMEL = Pattern(r"(?<=[a-z\d])(?=[A-Z])|_")  # between the words of an identifier


# --- quantities ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quantity:
    """A kind of hardware value. metrics: the rows of the wiki. words: the names in prose and identifiers. units: the
    possible units of a bare number."""

    name: str
    metrics: Pattern = field(repr=False)
    words: Pattern = field(repr=False)
    units: tuple[str, ...] = field(repr=False)


def _quantity(name: str, metrics: str, words: str, units: str) -> Quantity:
    return Quantity(name, Pattern(metrics), Pattern(rf"(?i)(?<![^\W_])(?:{words})(?![^\W_])"), tuple(units.split()))


QUANTITIES = (
    _quantity("link", r"nvlink\w*|infinity_fabric\w*", r"nv-?link\w*|c2c|infinity[ _]fabric|xgmi", "GB/s TB/s bytes/s"),
    _quantity(
        "bandwidth",
        r"memory_bandwidth|measured_\w+_bandwidth",
        r"(?:mem|hbm|dram|peak|copy)?(?:bandwidth|bw)|[gt]b?ps|[gt]bs|[gt]b[ _/]s|peak[ _]bytes|bytes[ _]per[ _]s(?:ec(?:ond)?)?",
        "GB/s TB/s bytes/s",
    ),
    _quantity(
        "compute",
        r"peak_\w+|measured_\w+_(?:matmul|ceiling)",
        r"(?:peak_?)?(?:[gtp]?flops|tops)|tensor[ _](?:peak|rate|throughput)|peak",
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
MEASURABLE = {"link", "bandwidth", "compute", "clock", "power"}  # programs can measure these
# The quantities that a unit alone identifies. A size or a count of threads needs words.
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
# Limits of an SM, a block or a thread. A kernel also has figures of these kinds.
LIMITS = {"registers", "threads", "warps", "blocks", "lanes", "shared memory", "LDS", "L1", "register file"}

_sm = r"(?:SMs?|CUs?|multi-?processors?|compute[ _]units?)"
_each = r"(?:/ ?|(?:\b(?:per|an?|each|every)|_per)[ _])"
SCOPES = {
    "sm": Pattern(rf"(?i)(?:{_each}|\b(?:one|the|in|on|of) ){_sm}\b|_per_(?:sm|cu)(?![^\W_])"),
    "block": Pattern(rf"(?i){_each}(?:thread[ _]?)?(?:block|cta|workgroup)(?![^\W_])"),
    "thread": Pattern(rf"(?i){_each}(?:thread|wavefront|lane)(?![^\W_])"),
}
METRIC_SCOPE = (
    ("_per_sm", "sm"),
    ("_per_cu", "sm"),
    ("_per_block", "block"),
    ("_per_workgroup", "block"),
    ("_per_thread", "thread"),
)


def scope_of_metric(metric: str) -> str | None:
    """Return the scope of a limit: sm, block or thread."""
    return next((scope for suffix, scope in METRIC_SCOPE if suffix in metric), None)


# --- the words around a figure -------------------------------------------------------------------------------------


def _words(*lists: str) -> str:
    """A pattern for any of the words, which are separated by two spaces or by the end of a list."""
    return "|".join(word for words in lists for word in re.split(r" {2,}", words.strip()))


CUES = {
    # the vendor's figure, which is not measured
    "documented": _words(
        r"vendor\w*  manufacturer  data ?sheets?  spec(?:s|ifications?|ified)?(?: sheet)?  white ?paper  document(?:ed|s|ation)",
        r"official\w*  nominal\w*  advertised  rated  theoretical\w*  on paper  marketing  brochure  nameplate  product page",
        r"promise[sd]?  (?:nvidia|amd) (?:says|claims|states|lists|quotes|promises)  according to (?:nvidia|amd)",
    ),
    # the most that the hardware gives
    "peak": _words(
        r"peaks?(?!ed)  max(?:imum|imal)?\.?  theoretical  hardware limit  boost  tdp  line rate  full (?:rate|bandwidth|speed)"
    ),
    # the most of anything
    "most": _words(
        r"at most  up to  no more than  limit(?!s |ed|ing|er)  max(?:imum|imal)?  caps?  ceiling  capacity  opt-?in",
        r"hard(?:ware)? (?:cap|limit)",
    ),
    # the most that fits
    "limit": _words(
        r"at most  up to  no more than  limit(?!s |ed|ing|er)  max(?:imum|imal)?  caps?  ceiling  capacity  opt-?in",
        r"at least  more than  most  can(?:not)?  may  must  allow\w*  holds?  has  have  support\w*  fits?  budget  available",
        r"addressable",
    ),
    # the text speaks of the device
    "device": _words(
        DEVICE_MARK + "+",
        r"(?:the|this|our|a|an|that|each|every|one|whole|per|same|other|of) (?:\w+ )?"
        r"(?:card|gpu|device|chip|board|part|accelerator|hardware|machine|die|silicon)s?",
        r"(?:card|gpu|device|chip|board|hardware|machine)(?:'s|s')",
    ),
    # a run reached it, or reaches it
    "ran": _words(
        "achieved  reached  attained  got  gave  sustained  ran  hit  clocked  observed  seen  averaged  came to  drew  drawn",
        "fell  dropped  rose  climbed  went  stayed  stood  sat  median  timed  profiled  counted  recorded",
    ),
    "runs": _words(
        r"achieves?  reach(?:es)?  attains?  gets?  gives?  sustains?  runs?  running  hits  comes to  draws?  falls?  drops?",
        r"rises?  climbs?  goes  stays?  stands?  sits?  measured  measures?",
    ),
    # a run could reach it; no run has to
    "modal": _words(r"can(?:not|'t)?  could  would  should  might  may  never  will  must"),
    # data and work, not the device
    "data": _words(
        r"reads?  written  writes?  wrote  load\w*  stor(?:e|es|ed|ing)  mov(?:es?|ed|ing)  traffic  fetch\w*  spill\w*  flush\w*",
        r"buffers?  tensors?  tiles?  stages?  matri(?:x|ces)  inputs?  outputs?  operands?  workspace  scratch  batch\w*  rows?",
        r"allocat\w+  us(?:es?|ed|ing)  tak(?:es?|ing)  needs?  asks?  wants?  fell  falls?  rose  rises?  dropp?\w*  in flight",
        r"apart  hits?  miss\w*  saved  cop(?:y|ies|ied)  bytes  footprint  working set  elements?  kernels?  launch\w*  grid",
        r"programs?  compiler  compiled  ptxas  occupied  resident  occupancy  idle  busy  v\d+",
    ),
}
CUE = {name: Pattern(rf"(?i)(?<![\w-])(?:{words})(?!\w)") for name, words in CUES.items()}
# "It has 144 SMs": a count after such a word belongs to the subject.
HAS = Pattern(r"(?i)\b(?:has|have|offers?|comes? with|counts?|contains?)\s+(?:only |just |exactly )*$")
# "92 % of peak" describes the percentage, not the figure next to it.
SHARE = Pattern(
    rf"(?i)(?P<pct>\d+(?:\.\d+)?)\s?(?:%|percent|per cent) of (?:\w+'s |[a-z]+ |{DEVICE_MARK}+(?:'s)? ){{0,4}}?"
    r"(?:peaks?|roofs?|bandwidth|maximum|max|rate|floor|limit|tdp|throughput|figure|value)\b"
)
# 137.4 GFLOPs of work, and 62 W for a width.
WORK_WORDS = Pattern(
    r"(?i)\bof (?:work|arithmetic|compute)\b|\b(?:per|a|each|in) (?:call|step|pass|launch|forward|iteration|token)\b|"
    r"\bin (?:all|total)\b|\b(?:needs?|costs?|counts?|takes?|does|do|counted|performs?|work|total)\b"
)
POWER_WORDS = Pattern(
    r"(?i)\b(?:power|tdp|dr[ea]w\w*|cap(?:ped|s)?|watts?|limit\w*|consum\w+|thermal|throttl\w+|budget|board|part|card|gpu|"
    r"envelope)\b"
)
RIDGE = Pattern(
    r"(?i)\bridge(?:[ _-]?point)?s?\b(?: of (?:the|this) \w+)?[\s:=,\"'*]*"
    r"(?:(?:is|lies|sits|of|at|near|about|around|would|be|comes|to|value|=)\s*)*$"
)
ONE_EACH = Pattern(
    rf"(?i)\bone (?:program |block |cta )?(?:per|for (?:each|every)|on (?:each|every)|an?|each) (?:of the )?{_sm}"
)

# --- sizes: a size is a hardware value only if the words around it say so --------------------------------------------

SIZES_OF = ("infinity cache", "L2", "L1", "shared memory", "LDS", "register file", "memory")
# Between a size and the memory behind it: "60 MB of unified L2".
OF = Pattern(
    r"(?i)[\s)\]]*(?:(?:of|the|its|an?|on|on-chip|unified|total|fast|large|big|dedicated|last-level|hardware|dynamic|static)"
    r"\b[\s-]*)*"
)
# Between a memory and the size behind it: "the L2 cache has only 60 MB".
LINK = Pattern(
    r"(?i)(?:[\s:=(\[,'\"·•/|+]|->|\b(?:"
    + _words(
        r"cache  memory  mem  capacity  size[sd]?  is  was  are  has  have  of  holds?  with  at  only  just  be  offers?  gives?",
        r"provides?  per  an?  the  its  each  every  sms?  cus?  block  cta  about  roughly  approximately  around  nearly  almost",
        r"max(?:imum)?  limit  total  up to  amounts? to  comes? (?:to|with)  most  stack  chips?  card  gpu  device  that  large",
        r"kb  mb  gb  bytes",
    )
    + r")\b)*"
)
# A size that is used, read or moved is data. A size before the word "buffer" is data too.
DATA_BEFORE = Pattern(
    r"(?i)(?<!can )(?<!may )(?<!cannot )\b(?:"
    + _words(
        r"us(?:es?|ed|ing)  needs?  tak(?:es?|ing)  asks? for  allocat\w+  occup\w+  reads?  writes?  wrote  mov(?:es?|ed)  loads?",
        r"fetch\w*  spill\w*  stores?  cop(?:y|ies|ied)  keeps?  kept  fills?  touch\w*  streams?  sends?  wants?  blocks? of",
        r"programs? of  traffic  flush\w*(?: with)?",
    )
    + r")\s+(?:up to |about |only |over |around |another |at most |a |an |just )*$"
)
DATA_AFTER = Pattern(
    r"(?i)^[\s)]*(?:of \w+ )?(?:(?:are|is|were|was|have been|has been) )?(?:"
    + _words(
        r"read  written  moved  loaded  stored  used  allocated  spilled  fetched  buffers?  tensors?  tiles?  stages?  workspace",
        r"scratch  traffic  in flight  apart  in use  a stage  a program  a tile  each  free  left",
    )
    + r")\b"
)
# "the L40S has 48 GB", "each SM has 65536 registers, 228 KB of …"
DEVICE_HAS = Pattern(
    rf"(?i)(?:{DEVICE_MARK}|\b(?:cards?|gpus?|device|board))(?:'s)?\s*(?:has|have|with|offers?|comes with|carries|[:=(])"
    r"\s*(?:only |just )?$"
)
# "NVIDIA L40S: 1 GB/s of bandwidth, 2 MB of L2 and 3 SMs"
LISTED = Pattern(
    rf"(?i){DEVICE_MARK}\s*(?:[:,(]|with|has)\s*"
    r"(?:\d[\d.]*\s?(?:[GT]B/s|TFLOPS|[KMG]i?B|[MG]Hz|W)\b(?:[^,;:\d]|(?<=[A-Za-z])\d){0,40}?(?:,|\band\b|\bwith\b)\s*(?:and\s+)?){1,4}\x02"
)
SM_HAS = Pattern(
    rf"(?i)\b(?:an?|each|every|one|the|per) {_sm}\s*(?:can |may )?(?:has|have|holds?|offers?|[:=])[^\x02]*\x02"
)
DATA_NOUN = Pattern(
    r"(?i)^[\s-]*(?:traffic|reads?|writes?|accesses|bytes|transactions|bandwidth|sectors|hits?|misses|requests)\b"
)
