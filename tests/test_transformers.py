"""Octavo under Transformers: logits against SDPA by the tolerance rule, tokens against SDPA's, and what is refused.

Tiny random models here; those marked `weights` need SmolLM2-135M, which examples/smollm2.py puts into its cache.
"""

import inspect
import os
import re
import sys
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
REASON = "needs transformers >= 5.17 (pip install 'octavo[transformers]')"
transformers = pytest.importorskip("transformers", minversion="5.17.0", reason=REASON)
pytestmark = pytest.mark.transformers

from transformers import (  # noqa: E402
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.generation.configuration_utils import ContinuousBatchingConfig  # noqa: E402
from transformers.generation.continuous_batching import cache as cb_cache  # noqa: E402

from octavo.integrations import transformers_paged  # noqa: E402
from octavo.integrations.transformers import NAME, PAGED_NAME, register  # noqa: E402

ROOT = Path(__file__).parent.parent
PAD, EOS = 258, 257
SHAPE = {
    "vocab_size": 259,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # large enough that greedy decoding does not repeat itself
    "bos_token_id": 256,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
PAGE_OPTION = "page_size" if "page_size" in inspect.signature(ContinuousBatchingConfig).parameters else "block_size"
HAS_PREFIXES = PAGE_OPTION == "block_size"
"""Transformers 5.17 names paged implementations "paged|...", and hands its cache to attention."""


@pytest.fixture(autouse=True)
def registered():
    register()


def tiny(config=LlamaConfig, model=LlamaForCausalLM, device="cpu", **changes):
    torch.manual_seed(0)
    return model(config(**{**SHAPE, **changes})).eval().to(device)


def prompts(lengths=(5, 17, 3, 40, 33), seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]


def padded(sequences, left):
    longest = max(map(len, sequences))
    pads = [longest - len(s) for s in sequences]
    rows = [[PAD] * n + s if left else s + [PAD] * n for s, n in zip(sequences, pads, strict=True)]
    mask = [[0] * n + [1] * len(s) if left else [1] * len(s) + [0] * n for s, n in zip(sequences, pads, strict=True)]
    return torch.tensor(rows), torch.tensor(mask)


def left_padded(sequences):
    return padded(sequences, left=True)


def right_padded(sequences):
    return padded(sequences, left=False)


def with_holes(sequences):
    ids, mask = padded(sequences, left=False)
    mask = mask * (torch.rand(mask.shape, generator=torch.Generator().manual_seed(3)) > 0.3)
    return ids, mask


@torch.no_grad()
def logits_of(model, implementation, ids, mask):
    model.set_attn_implementation(implementation)
    logits = model(ids.to(model.device), attention_mask=mask.to(model.device)).logits
    return logits[mask.bool()].double().cpu()


def assert_close(model, run):
    """The tolerance rule for run(model, implementation): off float64 by at most twice SDPA's error and a rounding."""
    dtype = model.dtype
    ours, theirs = (run(model, name) for name in (NAME, "sdpa"))
    exact = run(model.double(), "sdpa")
    model.to(dtype)
    allowed = 2 * (theirs - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
    assert (ours - exact).abs().max() <= allowed


def assert_logits(model, ids, mask):
    assert_close(model, lambda model, name: logits_of(model, name, ids, mask))


def settings(max_new_tokens=12, eos=EOS):
    return GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=eos, pad_token_id=PAD)


def one_by_one(model, sequences, implementation="sdpa", **options):
    model.set_attn_implementation(implementation)
    inputs = [torch.tensor([s], device=model.device) for s in sequences]
    out = [model.generate(ids, generation_config=settings(**options))[0, ids.shape[1] :] for ids in inputs]
    return [tokens.tolist() for tokens in out]


def batched(model, sequences, implementation=NAME, page_size=16, batching=None, **options):
    model.set_attn_implementation(implementation)
    on_cpu = {"use_cuda_graph": False, "use_async_batching": False} if model.device.type == "cpu" else {}
    batching = {PAGE_OPTION: page_size, "num_blocks": 64, "max_batch_tokens": 24, **on_cpu, **(batching or {})}
    out = model.generate_batch(
        sequences,
        generation_config=settings(**options),
        continuous_batching_config=ContinuousBatchingConfig(**batching),
        progress_bar=False,
    )
    return [out[name].generated_tokens for name in sorted(out, key=lambda name: int(name.rpartition("_")[2]))]


@pytest.mark.parametrize("pad", [left_padded, right_padded, with_holes], ids=lambda pad: pad.__name__)
def test_logits_of_a_padded_batch(pad):
    assert_logits(tiny(), *pad(prompts()))


def test_logits_without_a_mask_and_of_one_sequence():
    ids = torch.tensor(prompts((30,)))
    assert_logits(tiny(), ids, torch.ones_like(ids))


def test_generate_gives_the_same_tokens():
    model, sequences = tiny(), prompts()
    expected = one_by_one(model, sequences)
    assert len({token for tokens in expected for token in tokens}) > 20
    assert one_by_one(model, sequences, NAME) == expected
    ids, mask = padded(sequences, left=True)
    model.set_attn_implementation(NAME)
    out = model.generate(ids, attention_mask=mask, generation_config=settings())[:, ids.shape[1] :].tolist()
    for tokens, wanted in zip(out, expected, strict=True):
        assert tokens[: len(wanted)] == wanted


def test_a_static_cache_is_read_up_to_what_it_holds():
    model, sequences = tiny(), prompts((9, 9))
    ids = torch.tensor(sequences)
    out = {}
    for name in ("sdpa", NAME):
        model.set_attn_implementation(name)
        static = settings()
        static.cache_implementation = "static"
        out[name] = model.generate(ids, generation_config=static)
    assert out[NAME].tolist() == out["sdpa"].tolist()


@pytest.mark.parametrize("search", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=["beams", "lookup"])
def test_generate_in_other_ways(search):
    """Beams reorder the cache; prompt lookup checks several tokens at once, and takes some back."""
    model, ids = tiny(), torch.tensor(prompts((12,)))
    ids[:, 6:] = ids[:, :6]
    options = settings()
    options.update(**search)
    out = {}
    for name in ("sdpa", NAME):
        model.set_attn_implementation(name)
        out[name] = model.generate(ids, generation_config=options).tolist()
    assert out[NAME] == out["sdpa"]


@pytest.mark.parametrize("rows", [slice(0, 2), slice(1, 2)], ids=["padded", "alone"])
def test_an_encoder_and_its_decoder(rows):
    """Bidirectional and cross attention, of which only the decoder's own is causal."""
    torch.manual_seed(0)
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    shape = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 259, "init_std": 0.3}
    model = BartForConditionalGeneration(BartConfig(**shape, **heads, max_position_embeddings=64)).eval()
    ids, mask = right_padded([[4, 5, 6, 7, 8, 9], [11, 12, 13]])
    decoder_ids = torch.tensor([[2, 20, 21, 22], [2, 30, 31, 32]])

    @torch.no_grad()
    def run(model, name):
        model.set_attn_implementation(name)
        return model(ids[rows], attention_mask=mask[rows], decoder_input_ids=decoder_ids[rows]).logits.double()

    assert_close(model, run)


@pytest.mark.parametrize("page_size", [4, 16, 32])
def test_continuous_batching_with_chunked_prefill(page_size):
    """24 tokens a step: prompts of 33 and 40 come in chunks, in one step with others' decoding."""
    model, sequences = tiny(), prompts()
    expected = one_by_one(model, sequences)
    assert batched(model, sequences, page_size=page_size) == expected
    assert model.config._attn_implementation == NAME  # set again at the end


def test_the_paged_name_works_too():
    model, sequences = tiny(Qwen3Config, Qwen3ForCausalLM), prompts()
    name = f"paged|{PAGED_NAME}" if HAS_PREFIXES else PAGED_NAME
    expected = one_by_one(model, sequences)
    assert batched(model, sequences, implementation=name) == expected
    if HAS_PREFIXES:
        assert batched(model, sequences, implementation=f"paged|{NAME}") == expected


def test_shared_prefixes_are_shared(monkeypatch):
    model = tiny()
    first = prompts((40,))[0]
    sequences = [first, *([*first[:32], *tail] for tail in prompts((3, 5, 9), seed=2))]
    found, search = [], cb_cache.PagedAttentionCache.search_prefix_match

    def spy(*args, **kwargs):
        found.append(search(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(cb_cache.PagedAttentionCache, "search_prefix_match", spy)
    assert batched(model, sequences) == one_by_one(model, sequences)
    assert max(found) == 32


def test_nothing_is_gathered(monkeypatch):
    def update(*args, **kwargs):
        raise AssertionError("the cache was gathered")

    model, sequences = tiny(), prompts()
    expected = one_by_one(model, sequences)
    if HAS_PREFIXES:
        monkeypatch.setattr(cb_cache.PagedAttentionCache, "update", update)
    else:
        monkeypatch.setattr(cb_cache.FullAttentionCacheAllocator, "update", update)
    assert batched(model, sequences) == expected


def test_a_model_with_pinned_flash_implementations(monkeypatch):
    """Transformers replaces flash-like names of such models; 5.17 takes others for continuous batching, too."""
    model, sequences = tiny(), prompts((5, 30))
    expected = one_by_one(model, sequences)
    monkeypatch.setattr(model, "_compatible_flash_implementations", ["flash_attention_3"], raising=False)
    if HAS_PREFIXES:
        assert batched(model, sequences) == expected
        return
    with pytest.raises(ValueError, match="generate_batch: expected a model that takes any flash-like"):
        batched(model, sequences)


def test_a_model_may_be_made_with_octavo():
    config = LlamaConfig(**SHAPE)
    model = LlamaForCausalLM._from_config(config, attn_implementation=NAME).eval()
    assert model.config._attn_implementation == NAME
    assert_logits(model, *left_padded(prompts()))


def test_other_implementations_are_as_they_were():
    model, sequences = tiny(), prompts()
    assert batched(model, sequences, implementation="sdpa") == one_by_one(model, sequences)


def test_block_tables_of_decode_steps(monkeypatch):
    """Transformers gives block tables on a GPU only; its check is taken away, and the cache is read in place."""
    from transformers.generation.continuous_batching import initialization

    tables, attend = [], transformers_paged._attend_pages

    def spy(module, query, key, value, kv, table, *rest):
        tables.append(table)
        return attend(module, query, key, value, kv, table, *rest)

    model, sequences = tiny(), prompts()
    expected = one_by_one(model, sequences)
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *args: None)
    monkeypatch.setattr(transformers_paged, "_attend_pages", spy)
    assert batched(model, sequences, batching={"max_blocks_per_request": 8}) == expected
    assert any(isinstance(table, torch.Tensor) for table in tables)


def test_no_other_implementation_is_put_in_octavos_place(monkeypatch):
    """Where FlashAttention is installed, Transformers would switch a model over to it."""
    from transformers.generation.continuous_batching import continuous_api

    monkeypatch.setattr(continuous_api, "is_flash_attn_3_available", lambda **kwargs: True)
    model, sequences = tiny(), prompts((5,))
    assert batched(model, sequences) == one_by_one(model, sequences)


MIXED = {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True, "sliding_window": 9}


@pytest.mark.parametrize("layers", [MIXED, {**MIXED, "layer_types": ["sliding_attention"] * 2}], ids=["mixed", "all"])
def test_sliding_windows(layers):
    """Windows of 9 keys, prompts of up to 40: rings turn over, chunks are longer than the window."""
    model, sequences = tiny(Qwen3Config, Qwen3ForCausalLM, **layers), prompts()
    assert_logits(model, *left_padded(sequences))
    expected = one_by_one(model, sequences)
    assert one_by_one(model, sequences, NAME) == expected
    assert batched(model, sequences, page_size=4) == expected


def test_wrong_use_says_what_to_do():
    model = tiny()
    model.set_attn_implementation(NAME)
    ids = torch.tensor(prompts((8,)))
    with pytest.raises(ValueError, match=r"no gradient.*torch\.no_grad"):
        model(ids)
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"output_attentions.*eager"):
            model(ids, output_attentions=True)
        packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
        with pytest.raises(ValueError, match=r"attention mask.*cu_seq_lens_q"):
            model(ids, position_ids=packed, use_cache=False)
        with pytest.raises(ValueError, match="attention_mask: expected the table"):
            model(ids, attention_mask=torch.ones(1, 1, 8, 8, dtype=torch.bool))
    dropping = tiny(attention_dropout=0.5).train()
    dropping.set_attn_implementation(NAME)
    with torch.no_grad(), pytest.raises(ValueError, match=r"dropout.*model\.eval"):
        dropping(ids)


def test_registering_again_changes_nothing():
    from transformers import modeling_flash_attention_utils as utils

    before = utils._lazy_imports
    register()
    assert utils._lazy_imports is before
    assert before.__wrapped__.__module__ == utils.__name__


def test_the_documents_example_runs():
    page = (ROOT / "docs" / "integrations.md").read_text()
    names = {}
    for block in re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        exec(block, names)
    assert names["tokens"].shape == (2, 12)
    assert [len(x.generated_tokens) for x in names["outputs"].values()] == [8, 8]


@pytest.fixture
def smollm2(monkeypatch):
    """(tokenizer, model) of real weights."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import smollm2

    sys.modules.pop("smollm2")
    if not smollm2.is_ready():
        pytest.skip("needs SmolLM2-135M: python examples/smollm2.py")
    return smollm2.load("cuda" if torch.cuda.is_available() else "cpu", torch.float32)


@pytest.mark.weights
def test_real_weights(smollm2):
    """Logits of a padded batch; tokens with prompts that share a prefix, and come in chunks of 48 tokens."""
    tokenizer, model = smollm2
    system = "You answer in one short sentence, and you never say that you are a model."
    questions = ("Name the capital of France.", "What is 7 plus 5?", "List three fruits.")
    chats = [[{"role": "system", "content": system}, {"role": "user", "content": text}] for text in questions]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    sequences = [tokenizer(text).input_ids for text in texts]
    expected = one_by_one(model, sequences, eos=tokenizer.eos_token_id)
    options = {"batching": {"max_batch_tokens": 48}, "eos": tokenizer.eos_token_id}
    assert batched(model, sequences, page_size=8, **options) == expected
    assert "Paris" in tokenizer.decode(expected[0])
    assert_logits(model, *left_padded(sequences[:2]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_on_a_gpu(dtype):
    assert_logits(tiny(device="cuda").to(dtype), *left_padded(prompts()))


GRAPHS = {
    "defaults": {},
    "graphs": {"use_cuda_graph": True, "max_blocks_per_request": 8},
    "no graphs": {"use_cuda_graph": False, "use_async_batching": False},
    "no block tables": {"use_cuda_graph": True, "max_blocks_per_request": 0},
}


@pytest.mark.gpu
@pytest.mark.parametrize("options", GRAPHS.values(), ids=GRAPHS.keys())
def test_continuous_batching_on_a_gpu(options):
    """Float32, where Octavo and SDPA agree to the last token; CUDA graphs, block tables and asynchronous batches."""
    model, sequences = tiny(device="cuda", head_dim=32), prompts((5, 17, 3, 40, 33, 60, 2))
    expected = one_by_one(model, sequences, max_new_tokens=24)
    batching = {"num_blocks": 128, "max_batch_tokens": 32, **options}
    assert batched(model, sequences, batching=batching, max_new_tokens=24) == expected
