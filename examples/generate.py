"""SmolLM2-135M answers prompts: continuous batching of Transformers, its paged cache read by Octavo.

pip install 'octavo[examples]'
python examples/generate.py                     on a GPU if there is one, else on the CPU
python examples/generate.py "Why is the sky blue?" "Name three rivers." --max-new-tokens 64
python examples/generate.py --random            random weights: nothing is fetched, the answers mean nothing
"""

import argparse
import inspect
import time
from dataclasses import dataclass
from typing import Any

import smollm2
import torch

from octavo.integrations import transformers as octavo_transformers

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face."
PROMPTS = (
    "Name the capital of France.",
    "Write one sentence about the sea.",
    "What is 7 plus 5?",
    "Give a synonym of the word happy.",
    "Why do we sleep? Answer in one sentence.",
    "List three fruits.",
)


@dataclass
class Answers:
    """What one attention implementation generated."""

    tokens: list[list[int]]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="*", help="questions (default: six short ones)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--step-tokens", type=int, default=128, help="most tokens in one step; prompts come in chunks")
    parser.add_argument("--random", action="store_true", help="a tiny model of random weights and a byte tokenizer")
    parser.add_argument("--no-sdpa", action="store_true", help="leave out the comparison with SDPA")
    return parser.parse_args(arguments)


def random_model(device: str) -> tuple[Any, Any]:
    """A Llama of two layers, and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    torch.manual_seed(0)
    shape = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "initializer_range": 0.3}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = LlamaConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **ids, **shape, **heads)
    return tokenizer, LlamaForCausalLM(config).eval().to(device)


def encode(tokenizer: Any, prompt: str) -> list[int]:
    if tokenizer.chat_template is None:
        return tokenizer(prompt).input_ids
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
    return tokenizer(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)).input_ids


def answer(
    model: Any, prompts: list[list[int]], implementation: str, args: argparse.Namespace, max_new_tokens: int
) -> Answers:
    """All prompts at once, as one engine would serve them."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    eos, pad = model.generation_config.eos_token_id, model.generation_config.pad_token_id
    generation = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=eos, pad_token_id=eos if pad is None else pad
    )
    page = "page_size" if "page_size" in inspect.signature(ContinuousBatchingConfig).parameters else "block_size"
    pages = sum(-(-(len(p) + max_new_tokens) // args.page_size) for p in prompts)
    options = {page: args.page_size, "num_blocks": pages + 8, "max_batch_tokens": args.step_tokens}
    if args.device == "cpu":  # where there is a GPU beside it, Transformers would use that one's graphs
        options |= {"use_cuda_graph": False, "use_async_batching": False}
    model.set_attn_implementation(implementation)
    start = time.perf_counter()
    out = model.generate_batch(
        prompts,
        generation_config=generation,
        continuous_batching_config=ContinuousBatchingConfig(**options),
        progress_bar=False,
    )
    seconds = time.perf_counter() - start
    names = sorted(out, key=lambda name: int(name.rpartition("_")[2]))
    return Answers([out[name].generated_tokens for name in names], seconds)


def sdpa_name() -> str:
    """SDPA's name in continuous batching: prefixed up to Transformers 5.17."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return "paged|sdpa" if "paged|sdpa" in ALL_ATTENTION_FUNCTIONS.valid_keys() else "sdpa"


def main(arguments: list[str] | None = None) -> dict[str, Answers]:
    args = parse_arguments(arguments)
    octavo_transformers.register()
    dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    tokenizer, model = random_model(args.device) if args.random else smollm2.load(args.device, dtype)
    prompts = args.prompts or list(PROMPTS)
    encoded = [encode(tokenizer, prompt) for prompt in prompts]
    names = ["octavo"] if args.no_sdpa else ["octavo", sdpa_name()]
    results = {}
    for name in names:
        if args.device.startswith("cuda"):  # compiles kernels and captures graphs outside of the time
            answer(model, encoded, name, args, args.max_new_tokens)
        results[name] = answer(model, encoded, name, args, args.max_new_tokens)
    for prompt, tokens in zip(prompts, results["octavo"].tokens, strict=True):
        print(f"\n> {prompt}\n{tokenizer.decode(tokens, skip_special_tokens=True).strip()}")
    print(f"\n{len(prompts)} prompts, {args.device}, {model.dtype}, torch {torch.__version__}")
    for name, result in results.items():
        count = sum(map(len, result.tokens))
        print(f"{name:>12}: {count} tokens in {result.seconds:.1f} s, {result.tokens_per_second:.1f} tokens/s")
    if len(names) == 2:
        pairs = zip(results["octavo"].tokens, results[names[1]].tokens, strict=True)
        print(f"same tokens for {sum(a == b for a, b in pairs)} of {len(prompts)} prompts")
    return results


if __name__ == "__main__":
    main()
