"""Models of Hugging Face: a file with load() and inputs() from a config."""

import ast
import json

import forks_with_torch
import pytest
from conftest import tool_json
from kernelopt.errors import EnvironmentLacks, UsageError
from kernelopt.models import hugging_face

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float16",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 96,
    "use_cache": True,
}
OTHERS = {
    "encoder and decoder": (
        {"model_type": "t5", "vocab_size": 50, "is_encoder_decoder": True},
        {"input_ids": [1, 512], "decoder_input_ids": [1, 64], "use_cache": False},
    ),
    "spectrum": (
        {"model_type": "whisper", "vocab_size": 50, "num_mel_bins": 80, "max_source_positions": 30},
        {"input_features": [1, 80, 60], "decoder_input_ids": [1, 64], "use_cache": False},
    ),
    "sound": (
        {"model_type": "wav2vec2", "vocab_size": 32, "feat_extract_norm": "group"},
        {"input_values": [1, 80000]},
    ),
    "images": ({"model_type": "vit", "image_size": 32, "num_channels": 1}, {"pixel_values": [8, 1, 32, 32]}),
    "oblong images": ({"model_type": "x", "image_size": [32, 64]}, {"pixel_values": [8, 3, 32, 64]}),
    "images by height and width": (
        {"model_type": "x", "image_size": {"height": 32, "width": 64}},
        {"pixel_values": [8, 3, 32, 64]},
    ),
    "images of no size": ({"model_type": "resnet", "num_channels": 3}, {"pixel_values": [8, 3, 224, 224]}),
    "tokens": ({"model_type": "bert", "vocab_size": 50}, {"input_ids": [1, 512]}),
}


@pytest.fixture
def llama(tmp_path):
    """A folder with the config of a small decoder."""
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def test_each_kind_of_model_gets_inputs_of_its_kind():
    """The files are run without transformers: their inputs need none of it."""
    texts = {
        kind: hugging_face.source(kind, {"architectures": ["X"], **config}) for kind, (config, _) in OTHERS.items()
    }
    code = f"""if True:
    import json, sys, types
    sys.modules["transformers"] = types.ModuleType("transformers")
    found = {{}}
    for kind, text in {texts!r}.items():
        exec(text, own := {{}})
        given = own["inputs"]().items()
        found[kind] = {{name: list(one.shape) if hasattr(one, "shape") else one for name, one in given}}
    print("found", json.dumps(found))
    """
    done = forks_with_torch.run(code)
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout.split("found ")[1]) == {kind: expected for kind, (_, expected) in OTHERS.items()}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama"}, "names no architecture"),
        ({"architectures": ["a; b"], "model_type": "llama"}, "names no architecture"),
        ({"architectures": "LlamaModel", "model_type": "llama"}, "names no architecture"),
        ({"architectures": {"a": "X"}, "model_type": "llama"}, "names no architecture"),
        ({"architectures": ["class"], "model_type": "llama"}, "names no architecture"),
        ({"architectures": ["X"], "model_type": "x", "image_size": [32, 32, 3]}, r"image_size of x is \[32, 32, 3\]"),
        ({"architectures": ["X"], "model_type": "x", "image_size": "big"}, "image_size of x is 'big'"),
        ({"architectures": ["X"], "model_type": "clip", "text_config": {}}, "inputs of several kinds"),
        ({"architectures": ["X"], "model_type": "new"}, "neither tokens nor images nor sound"),
    ],
)
def test_a_config_of_another_kind_is_refused(config, message):
    with pytest.raises(UsageError, match=message):
        hugging_face.source("x", config)


def test_any_path_of_a_config_gives_a_file_of_python():
    text = hugging_face.source('a\\xs/"""/b"', LLAMA)
    assert 'a\\xs/"""/b"' in ast.get_docstring(ast.parse(text))


def test_a_config_is_known_by_its_name_its_folder_and_its_file(llama, tmp_path, monkeypatch):
    own = tmp_path / "own.py"
    own.write_text("")
    for model, expected in ((llama, True), (llama / "config.json", True), (own, False), (tmp_path / "gone.py", False)):
        assert hugging_face.is_config(model) == expected
        if not expected:
            continue
        with pytest.raises(UsageError, match=r"find_kernels\.py .* --write MODEL\.py"):
            hugging_face.check_file(model)
        assert hugging_face.read(model) == LLAMA
    (llama / "config.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        hugging_face.read(llama)
    with pytest.raises(UsageError, match="no name of a config"):
        hugging_face.read(tmp_path / "a" / "b" / "c")
    monkeypatch.setattr(hugging_face.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentLacks, match="pip install transformers"):
        hugging_face.write(llama, tmp_path / "model.py")


def test_a_small_decoder_goes_from_its_config_to_the_kernels_of_a_step(llama, tmp_path, run_here):
    pytest.importorskip("transformers", reason="needs transformers")
    file = tmp_path / "model.py"
    options = ("--write", file, "--device", "cpu-interpreter", "--ways", "--budget-seconds", 0.2)
    found = tool_json("find_kernels.py", llama, *options, run=run_here)
    assert any("self_attn" in group["name"] for group in found["groups"])
    assert "TOKENS = 96" in file.read_text() and "DTYPE = torch.float16" in file.read_text()
    done = run_here("find_kernels.py", llama, *options)
    assert done.returncode == 2 and "exists already" in done.stderr
    done = run_here("find_kernels.py", file, "--write", tmp_path / "other.py", "--device", "cpu-interpreter")
    assert done.returncode == 2 and "goes with a Hugging Face config" in done.stderr
