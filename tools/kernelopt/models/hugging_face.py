"""A model's file from a Hugging Face config: the architecture that it names, with random weights. Nothing is imported
of transformers here; the file needs it."""

import importlib.util
import json
import keyword
import re
import tempfile
from pathlib import Path

from .. import bundle
from ..errors import EnvironmentLacks, UsageError, say

NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
OWN = "write a file with load() and inputs() yourself: docs/models.md"
TEMPLATE = '''"""{architecture} with random weights, by the config of {name}. One forward pass without a cache."""

import json

import torch
import transformers

CONFIG = json.loads(r"""{config}""")
DTYPE = torch.{dtype}
{sizes}


def load():
    torch.set_default_dtype(DTYPE)
    try:
        return transformers.{architecture}(transformers.AutoConfig.for_model(**CONFIG))
    finally:
        torch.set_default_dtype(torch.float32)


def inputs():
    return {{{inputs}}}
'''
TOKENS, DECODED, IMAGES, SIDE, SAMPLES = 512, 64, 8, 224, 80_000  # side: pixels; samples: five seconds


def check_file(model: Path) -> None:
    """UsageError where the model is no file of Python."""
    if not model.is_file() or model.suffix == ".json":
        of_config = f"; for a Hugging Face config: find_kernels.py {model} --write MODEL.py" * is_config(model)
        raise UsageError(f"{model} is not a file of Python{of_config}")


def is_config(model: Path) -> bool:
    """Is it a config's name, folder or file?"""
    return model.suffix != ".py" and (model.suffix == ".json" or not model.is_file())


def write(model: Path, file: Path) -> None:
    """Write a model's file. model: a folder with config.json, such a file, or a name on the hub. EnvironmentLacks
    without transformers; UsageError where there is no such config, or one of a kind that this cannot feed."""
    if importlib.util.find_spec("transformers") is None:
        raise EnvironmentLacks(
            f"{model} is no file of Python; for a Hugging Face config, install transformers: pip install transformers"
        )
    if file.exists():
        raise UsageError(f"{file} exists already; it is left as it is")
    bundle.write_text(file, source(str(model), read(model)))


def read(model: Path) -> dict:
    """The config. Of a name: from the user's cache, or else from the hub, and then kept nowhere."""
    local = next((one for one in (model / "config.json", model) if one.is_file()), None)
    if local is None and (model.exists() or not NAME.fullmatch(str(model))):
        raise UsageError(f"{model} is no file, no folder with a config.json, and no name of a config")
    try:
        config = json.loads(local.read_text(encoding="utf-8") if local else of_hub(str(model)))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        elsewhere = "" if local else "; a folder with its config.json does as well"
        raise UsageError(f"the config of {model} cannot be read: {reason}{elsewhere}") from None
    if not isinstance(config, dict):
        raise UsageError(f"the config of {model} is no JSON object")
    return config


def of_hub(name: str) -> str:
    """The text of config.json. OSError or ValueError where it cannot be had."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.utils import logging

    if isinstance(cached := try_to_load_from_cache(name, "config.json"), str):
        return Path(cached).read_text(encoding="utf-8")
    say(f"fetching the config of {name} from the Hugging Face hub")
    logging.set_verbosity_error()  # of each retry
    with tempfile.TemporaryDirectory() as folder:
        return Path(hf_hub_download(name, "config.json", cache_dir=folder)).read_text(encoding="utf-8")


def source(name: str, config: dict) -> str:
    """The text of a model's file. UsageError for a config without an architecture, or of a kind that has no inputs
    here."""
    architecture = architecture_of(config)
    if not (architecture and config.get("model_type")):
        raise UsageError(f"the config of {name} names no architecture and model_type; {OWN}")
    sizes, inputs = fed(name, config)
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return TEMPLATE.format(
        architecture=architecture,
        name=json.dumps(name)[1:-1],
        config=json.dumps(config, indent=2),
        sizes="\n".join(f"{key} = {value}" for key, value in sizes.items()),
        dtype=dtype if dtype in ("float16", "bfloat16") else "bfloat16",
        inputs=", ".join(f'"{key}": {value}' for key, value in inputs.items()),
    )


def architecture_of(config: dict) -> str | None:
    """The first architecture's name, None where there is none that Python takes for a name."""
    named = config.get("architectures")
    first = str(named[0]) if isinstance(named, list) and named else ""
    return first if first.isidentifier() and not keyword.iskeyword(first) else None


def fed(name: str, config: dict) -> tuple[dict[str, int], dict[str, str]]:
    """(constants of the file, code of each argument of the model)"""
    if "text_config" in config or "vision_config" in config:
        raise UsageError(f"{name} takes inputs of several kinds; {OWN}")
    if "num_mel_bins" in config and "max_source_positions" in config:
        spectrum = 'torch.randn(BATCH, CONFIG["num_mel_bins"], 2 * CONFIG["max_source_positions"], dtype=DTYPE)'
        return with_decoder({"BATCH": 1}, {"input_features": spectrum})
    if "feat_extract_norm" in config:
        return {"BATCH": 1, "SAMPLES": SAMPLES}, {"input_values": "torch.randn(BATCH, SAMPLES, dtype=DTYPE)"}
    if "vocab_size" in config:
        limits = (config.get(key) for key in ("max_position_embeddings", "n_positions", "n_ctx"))
        sizes = {"BATCH": 1, "TOKENS": min([TOKENS, *(one for one in limits if isinstance(one, int) and one > 0)])}
        inputs = {"input_ids": 'torch.randint(0, CONFIG["vocab_size"], (BATCH, TOKENS))'}
        if config.get("is_encoder_decoder"):
            return with_decoder(sizes, inputs)
        return sizes, {**inputs, **({"use_cache": "False"} if config.get("use_cache") else {})}
    if "image_size" in config or "num_channels" in config:
        height, width = image_sides(name, config.get("image_size", SIDE))
        image = f"{config.get('num_channels', 3)}, {height}, {width}"
        return {"BATCH": IMAGES}, {"pixel_values": f"torch.randn(BATCH, {image}, dtype=DTYPE)"}
    raise UsageError(f"{name} takes neither tokens nor images nor sound, as its config says; {OWN}")


def image_sides(name: str, size) -> tuple[int, int]:
    """(height, width) in pixels of a config's image_size. UsageError where it is none."""
    if isinstance(size, dict):
        size = [size.get("height"), size.get("width")]
    sides = size if isinstance(size, list) else [size, size]
    if len(sides) != 2 or not all(isinstance(side, int) for side in sides):
        raise UsageError(f"the image_size of {name} is {size!r}, not one side or two; {OWN}")
    return tuple(sides)


def with_decoder(sizes: dict[str, int], inputs: dict[str, str]) -> tuple[dict[str, int], dict[str, str]]:
    """What an encoder takes, with the tokens of its decoder."""
    tokens = 'torch.randint(0, CONFIG["vocab_size"], (BATCH, DECODED))'
    return {**sizes, "DECODED": DECODED}, {**inputs, "decoder_input_ids": tokens, "use_cache": "False"}
