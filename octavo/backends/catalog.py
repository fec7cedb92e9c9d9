"""Every kernel, in the forms compiled ahead of time by `octavo compile` and the tests, without a GPU."""

from dataclasses import dataclass, field
from typing import Any

import torch

from octavo.backends import hopper
from octavo.backends import triton as launchers
from octavo.backends.tensor_maps import RUNS_FLAT, RUNS_IN_PAGE, RUNS_NEVER
from octavo.planning.tiles import ASYNC_TENSOR_CORES, MEDIUM_ROWS, rows_per_tile
from octavo.problem import Arch, AttentionSpec

POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
ALIGNED = [["tt.divisibility", 16]]

Signature = dict[str, Any]


@dataclass(frozen=True)
class KernelBuild:
    """One kernel in one form, as triton.compiler.ASTSource takes it, with what its machine code must hold."""

    name: str
    function: Any
    signature: Signature
    constexprs: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], list]
    options: dict[str, int] = field(default_factory=dict)
    expect: tuple[str, ...] = ()
    """Instruction mnemonics of which each must appear."""
    max_spills: int | None = 0
    """Most bytes of register spills; None allows any."""


SPECS = (
    AttentionSpec(32, 4, 128),
    AttentionSpec(32, 4, 128, page_size=16),
    AttentionSpec(28, 4, 128, page_size=16, causal=False, dtype=torch.float16),
    AttentionSpec(9, 3, 64, dtype=torch.float16),
    AttentionSpec(32, 8, 96),
    AttentionSpec(32, 32, 80, page_size=16),
    AttentionSpec(16, 16, 192, 128),
    AttentionSpec(8, 1, 256, page_size=64),
    AttentionSpec(32, 4, 128, dtype=torch.float32),
    AttentionSpec(8, 4, 256, dtype=torch.float32),
)

HOPPER = 90
HOPPER_FORMS: tuple[tuple[Any, ...], ...] = (
    (AttentionSpec(32, 4, 128), RUNS_NEVER),
    (AttentionSpec(32, 4, 128), RUNS_FLAT),
    (AttentionSpec(32, 4, 128, page_size=64), RUNS_IN_PAGE),
    (AttentionSpec(28, 4, 128, page_size=16, causal=False, dtype=torch.float16), RUNS_FLAT),
    (AttentionSpec(9, 3, 64), RUNS_FLAT),
    (AttentionSpec(9, 3, 64), RUNS_FLAT, True),
    (AttentionSpec(8, 1, 256, page_size=64), RUNS_FLAT),
)


def builds(sm: int) -> list[KernelBuild]:
    """All builds for compute capability `sm` (90 for sm_90)."""
    arch = Arch("cuda", (sm // 10, sm % 10))
    found = [_attention(spec, block_m, arch) for spec in SPECS for block_m in _block_ms(spec)]
    found += [_plan(SPECS[0], dense=False), _plan(SPECS[1], dense=True)]
    if sm == HOPPER:
        found += [hopper_build(*form) for form in HOPPER_FORMS]
    return [*found, _append(SPECS[1]), _merge(SPECS[0], 2)]


def _block_ms(spec: AttentionSpec) -> list[int]:
    """Each tile size that some batch of this spec gets."""
    return sorted({rows_per_tile(spec, tokens, 1) for tokens in (1, MEDIUM_ROWS // spec.group_size, 4096)})


def _build(name: str, function: Any, signature: Signature, constants: dict[str, Any], **rest: Any) -> KernelBuild:
    """Arguments by name: a type, a tuple of types, or None for an absent tensor; strides of 1 are written "one"."""
    names = list(function.arg_names)
    constexprs: dict[tuple[int, ...], Any] = {(names.index(n),): value for n, value in constants.items()}
    attributes = {}
    for n, kind in signature.items():
        for path, element in _elements(kind, (names.index(n),)):
            if element is None or element == "one":
                constexprs[path] = None if element is None else 1
            elif element[0] == "*" or (element == "i32" and len(path) > 1):
                attributes[path] = ALIGNED
    types = {n: _typed(signature[n]) if n in signature else "constexpr" for n in names}
    return KernelBuild(name, function, types, constexprs, attributes, **rest)


def _elements(kind: Any, path: tuple[int, ...]) -> list[tuple[tuple[int, ...], str | None]]:
    if isinstance(kind, tuple):
        return [leaf for i, element in enumerate(kind) for leaf in _elements(element, (*path, i))]
    return [(path, kind)]


def _typed(kind: Any) -> Any:
    if isinstance(kind, tuple):
        return tuple(_typed(element) for element in kind)
    return "constexpr" if kind in (None, "one") else kind


def _attention(spec: AttentionSpec, block_m: int, arch: Arch) -> KernelBuild:
    from octavo.kernels.attention import attention_kernel

    constants, options = launchers.attention_constants(spec, block_m, arch, same_strides=True)
    data = POINTERS[spec.dtype]
    signature: Signature = dict.fromkeys(("q_ptr", "k_cache", "v_cache", "out"), data)
    signature |= {"lse": "*fp32", "plan": "*i32", "page_table": "*i32", "scale_ptr": None, "sm_scale": "fp32"}
    signature |= {"num_tokens": "i32", "num_pages": "i32", "q_strides": ("i32", "i32"), "out_strides": ("i32", "i32")}
    signature |= {"k_strides": ("i32",) * 3, "v_strides": ("i32",) * 3, "lse_strides": ("i32", "one")}
    wgmma = arch.sm == 90 and block_m >= MEDIUM_ROWS and spec.dtype != torch.float32
    mma = "HGMMA" if wgmma else "MMA" if arch.sm in ASYNC_TENSOR_CORES else "HMMA"
    name = (
        f"attention h{spec.num_qo_heads}/{spec.num_kv_heads} d{spec.head_dim}/{spec.v_dim} ps{spec.page_size} "
        f"{str(spec.dtype).removeprefix('torch.')} {'causal' if spec.causal else 'full'} m{block_m}"
    )
    # A float32 product is three tf32 ones: more live operands than registers, right and slower.
    spills = None if spec.dtype == torch.float32 else 0
    return _build(
        name, attention_kernel, signature, constants, options=options, expect=(mma, "LDGSTS"), max_spills=spills
    )


def hopper_build(spec: AttentionSpec, runs: int, scaled: bool = False) -> KernelBuild:
    from octavo.kernels.attention_hopper import attention_hopper_kernel as kernel

    constants, options = hopper.attention_constants(spec, runs)
    signature: Signature = dict.fromkeys(("q", "k_cache", "v_cache", "out"), POINTERS[spec.dtype])
    signature |= {"lse": "*fp32", "plan": "*i32", "page_table": "*i32", "scale_log2": "fp32"}
    signature |= {"scale": "*fp32" if scaled else None, "tensor_maps": "*u8" if runs else "*i32"}
    signature |= {n: "i32" for n in kernel.arg_names if n not in (*signature, *constants)}
    expect = ("HGMMA", "LDGSTS", "UTMALDG") if runs else ("HGMMA", "LDGSTS")
    form = ("scattered", "runs", "runs in a page")[runs] + (" scaled" if scaled else "")
    name = f"hopper h{spec.num_qo_heads}/{spec.num_kv_heads} d{spec.head_dim} ps{spec.page_size} {form}"
    return _build(name, kernel, signature, constants, options=options, expect=expect)


def _plan(spec: AttentionSpec, dense: bool) -> KernelBuild:
    from octavo.kernels.plan import plan_kernel

    signature: Signature = dict.fromkeys(("plan", "qo_indptr", "kv_ptr"), "*i32")
    signature |= {"last_page_len": None if dense else "*i32", "table_stride": "i32"}
    signature |= dict.fromkeys(("entries", "num_tokens", "num_sequences", "capacity"), "i32")
    name = f"plan {'dense' if dense else 'csr'}"
    return _build(name, plan_kernel, signature, launchers.plan_constants(spec, 128, dense))


def _append(spec: AttentionSpec) -> KernelBuild:
    from octavo.kernels.append import append_kernel

    signature: Signature = dict.fromkeys(("k", "v", "k_cache", "v_cache"), POINTERS[spec.dtype])
    signature |= dict.fromkeys(("qo_indptr", "kv_ptr", "last_page_len", "page_table"), "*i32")
    scalars = ("table_stride", "entries", "num_tokens", "num_sequences", "num_pages", "steps")
    signature |= dict.fromkeys(scalars, "i32")
    signature |= dict.fromkeys(("k_in_strides", "v_in_strides"), ("i32",) * 2)
    signature |= dict.fromkeys(("k_strides", "v_strides"), ("i32",) * 3)
    constants = launchers.append_constants(spec.page_size, spec.head_dim, spec.v_dim, dense=False)
    return _build("append", append_kernel, signature, constants)


def _merge(spec: AttentionSpec, states: int) -> KernelBuild:
    from octavo.kernels.merge import merge_kernel

    data = POINTERS[spec.dtype]
    signature: Signature = {"outs": (data,) * states, "lses": ("*fp32",) * states, "out": data, "lse": "*fp32"}
    signature |= {"out_strides_in": (("i32", "i32"),) * states, "lse_strides_in": (("i32", "one"),) * states}
    signature |= {"out_strides": ("i32", "i32"), "lse_strides": ("i32", "one"), "num_rows": "i32"}
    return _build("merge", merge_kernel, signature, launchers.merge_constants(spec.num_qo_heads, spec.v_dim))
