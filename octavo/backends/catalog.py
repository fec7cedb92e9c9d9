"""Every kernel, in the forms compiled ahead of time by `octavo compile` and the tests, without a GPU."""

from dataclasses import dataclass, field
from typing import Any

import torch

from octavo.backends import hopper
from octavo.backends.constants import (
    append_constants,
    launches_early,
    list_options,
    merge_constants,
    plan_constants,
    plan_options,
)
from octavo.backends.extras import BYTE_MASK, HEAD_SCALES, NO_KINDS, NUMBER, ONE_SCALE, PACKED_MASK, Kinds
from octavo.backends.portable import attention_form, inline_constants
from octavo.backends.tensor_maps import RUNS_FLAT, RUNS_IN_PAGE, RUNS_NEVER
from octavo.backends.triton import TritonBackend
from octavo.planning.form import PlanForm, SplitChoice, schedule_config
from octavo.planning.schedule import ScheduleConfig
from octavo.planning.tiles import ASYNC_TENSOR_CORES, MEDIUM_ROWS, SMALL_ROWS, many_tile, rows_per_tile
from octavo.problem import Arch, AttentionSpec
from octavo.work_item import NUM_ITEMS

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
}
ALIGNED = [["tt.divisibility", 16]]
WARP_SIZE = 32

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

    def compile(self, sm: int) -> Any:
        """Triton's compiled kernel for compute capability `sm`, without a GPU. Raises what Triton raises."""
        import triton
        from triton.backends.compiler import GPUTarget

        if self.function.is_gluon():
            from triton.experimental.gluon._runtime import GluonASTSource as Source
        else:
            from triton.compiler import ASTSource as Source
        source = Source(self.function, self.signature, self.constexprs, self.attributes)
        return triton.compile(source, target=GPUTarget("cuda", sm, WARP_SIZE), options=dict(self.options))


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

WORKERS = 264
PLAN_FORMS = (
    (SPECS[0], PlanForm(16, 0, WORKERS, 0), False),
    (SPECS[0], PlanForm(128, 16, WORKERS, WORKERS), False),
    (SPECS[1], PlanForm(128, 16, 0, WORKERS), True),
    (SPECS[1], PlanForm(128, 16, WORKERS, WORKERS, batch_invariant=1), False),
)
INLINE_FORMS = tuple((spec, cuts, dense) for spec in SPECS[:2] for cuts in (False, True) for dense in (False, True))
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
VARIANTS = (
    (AttentionSpec(32, 4, 128, page_size=16, window_left=1023, sinks=True), NO_KINDS, 128),
    (AttentionSpec(32, 4, 128, causal=False, window_left=100, window_right=100), NO_KINDS, 64),
    (AttentionSpec(32, 4, 128, logits_soft_cap=30.0, alibi=True), NO_KINDS, 128),
    (AttentionSpec(32, 4, 128, custom_mask=True), Kinds(mask=PACKED_MASK), 64),
    (AttentionSpec(32, 4, 128, custom_mask=True), Kinds(mask=BYTE_MASK), SMALL_ROWS),
    (AttentionSpec(32, 4, 128, kv_dtype=E5M2), Kinds(ONE_SCALE, NUMBER), SMALL_ROWS),
    (AttentionSpec(32, 4, 128, kv_dtype=E4M3), Kinds(HEAD_SCALES, HEAD_SCALES), SMALL_ROWS),
    (AttentionSpec(32, 4, 128, kv_dtype=E4M3), NO_KINDS, 128),
)
HOPPER = 90
HOPPER_FORMS: tuple[tuple[Any, ...], ...] = (
    (AttentionSpec(32, 4, 128), RUNS_NEVER),
    (AttentionSpec(32, 4, 128), RUNS_FLAT, False, True),
    (AttentionSpec(32, 4, 128), RUNS_FLAT),
    (AttentionSpec(32, 4, 128, page_size=64), RUNS_IN_PAGE),
    (AttentionSpec(28, 4, 128, page_size=16, causal=False, dtype=torch.float16), RUNS_FLAT),
    (AttentionSpec(9, 3, 64), RUNS_FLAT),
    (AttentionSpec(9, 3, 64), RUNS_FLAT, True, True),
    (AttentionSpec(8, 1, 256, page_size=64), RUNS_FLAT),
)


def builds(sm: int) -> list[KernelBuild]:
    """All builds for compute capability `sm` (90 for sm_90)."""
    arch = Arch("cuda", (sm // 10, sm % 10))
    found = [_attention(spec, block_m, arch) for spec in SPECS for block_m in _block_ms(spec)]
    found += [_attention(SPECS[0], SMALL_ROWS, arch, cuts=False), _attention(SPECS[0], SMALL_ROWS, arch, many=True)]
    found += [_inline(spec, arch, cuts, dense) for spec, cuts, dense in INLINE_FORMS]
    found += [_plan(spec, form, dense, arch) for spec, form, dense in PLAN_FORMS]
    portable = TritonBackend()
    served = [form for form in VARIANTS if portable.reject(form[0], arch) is None]
    found += [_attention(spec, block_m, arch, kinds=kinds) for spec, kinds, block_m in served]
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


def _attention(
    spec: AttentionSpec,
    block_m: int,
    arch: Arch,
    cuts: bool = True,
    many: bool = False,
    kinds: Kinds = NO_KINDS,
) -> KernelBuild:
    from octavo.kernels.attention import attention_kernel

    override = many_tile(spec, arch) if many else None
    _, constants, options = attention_form(spec, block_m, arch, True, cuts, override, kinds)
    signature = {"plan": "*i32", "first_item": "i32", "states_begin": "i32", "num_states": "i32"}
    signature |= _attention_signature(spec, kinds)
    wgmma = arch.sm == 90 and block_m >= MEDIUM_ROWS and spec.dtype != torch.float32
    mma = "HGMMA" if wgmma else "MMA" if arch.sm in ASYNC_TENSOR_CORES else "HMMA"
    # A float32 product is three tf32 ones: more live operands than registers, right and slower.
    spills = None if spec.dtype == torch.float32 else 0
    name = f"attention {_name(spec)} m{block_m}{'' if cuts else ' uncut'}{' many' if many else ''}"
    early = launches_early(arch)
    constants = {"COUNT": NUM_ITEMS, **constants, "EARLY": early}
    options |= list_options(arch)
    return _build(
        name, attention_kernel, signature, constants, options=options, expect=(mma, "LDGSTS"), max_spills=spills
    )


def _inline(spec: AttentionSpec, arch: Arch, cuts: bool, dense: bool) -> KernelBuild:
    from octavo.kernels.attention import attention_inline_kernel

    _, shared, options = attention_form(spec, SMALL_ROWS, arch, same_strides=True, cuts=cuts)
    config = _config(PlanForm(SMALL_ROWS, 0, WORKERS if cuts else 0, 0))
    constants = {"C": inline_constants(spec, config, dense), **shared}
    signature: Signature = {"states": "*fp32", "counters": "*i32" if cuts else "*fp32", "num_states": "i32"}
    signature |= _attention_signature(spec) | _table_signature(spec, dense) | {"num_sequences": "i32"}
    name = f"attention inline {_name(spec)} {'dense' if dense else 'csr'}{'' if cuts else ' uncut'}"
    return _build(name, attention_inline_kernel, signature, constants, options=options, expect=("LDGSTS",))


def _attention_signature(spec: AttentionSpec, kinds: Kinds = NO_KINDS) -> Signature:
    signature: Signature = dict.fromkeys(("q_ptr", "out"), POINTERS[spec.dtype])
    signature |= dict.fromkeys(("k_cache", "v_cache"), POINTERS[spec.cache_dtype])
    signature |= {"extras": None, "mask_length": "i32" if kinds.mask else None}
    if not spec.is_plain:
        floats = ("*fp32" if there else None for there in (spec.sinks, spec.alibi, kinds.k_scale))
        v_scale = "fp32" if kinds.v_scale == NUMBER else "*fp32" if kinds.v_scale else None
        signature["extras"] = (*floats, v_scale, *(("*u8", "*i32") if kinds.mask else (None, None)))
    signature |= {"lse": "*fp32", "page_table": "*i32", "scale_ptr": None, "sm_scale": "fp32"}
    signature |= {"num_tokens": "i32", "num_pages": "i32", "q_strides": ("i32", "i32"), "out_strides": ("i32", "i32")}
    return signature | {"k_strides": ("i32",) * 3, "v_strides": ("i32",) * 3, "lse_strides": ("i32", "one")}


def _table_signature(spec: AttentionSpec, dense: bool) -> Signature:
    last = None if dense or spec.page_size == 1 else "*i32"
    signature: Signature = {"qo_indptr": "*i32", "kv_ptr": "*i32", "last_page_len": last}
    return signature | {"table_stride": "i32", "entries": "i32"}


def _name(spec: AttentionSpec) -> str:
    return (
        f"h{spec.num_qo_heads}/{spec.num_kv_heads} d{spec.head_dim}/{spec.v_dim} ps{spec.page_size} "
        f"{str(spec.dtype).removeprefix('torch.')} {'causal' if spec.causal else 'full'}"
    ) + "".join(f" {name}" for name in spec.variants)


def _config(form: PlanForm) -> ScheduleConfig:
    return schedule_config(form, SplitChoice())


def hopper_build(spec: AttentionSpec, runs: int, scaled: bool = False, cuts: bool = False) -> KernelBuild:
    from octavo.kernels.attention_hopper import attention_hopper_kernel as kernel

    constants, options = hopper.attention_constants(spec, runs, cuts)
    signature: Signature = dict.fromkeys(("q", "k_cache", "v_cache", "out"), POINTERS[spec.dtype])
    signature |= {"lse": "*fp32", "plan": "*i32", "page_table": "*i32", "scale_log2": "fp32"}
    signature |= {"scale": "*fp32" if scaled else None, "tensor_maps": "*u8" if runs else "*i32"}
    signature |= {n: "i32" for n in kernel.arg_names if n not in (*signature, *constants)}
    expect = ("HGMMA", "LDGSTS", "UTMALDG") if runs else ("HGMMA", "LDGSTS")
    form = ("scattered", "runs", "runs in a page")[runs] + " scaled" * scaled + " cut" * cuts
    name = f"hopper h{spec.num_qo_heads}/{spec.num_kv_heads} d{spec.head_dim} ps{spec.page_size} {form}"
    return _build(name, kernel, signature, constants, options=options, expect=expect)


def _plan(spec: AttentionSpec, form: PlanForm, dense: bool, arch: Arch) -> KernelBuild:
    from octavo.kernels.plan import plan_kernel

    signature = {"plan": "*i32"} | _table_signature(spec, dense)
    scalars = ("num_tokens", "num_sequences", "capacity", "main_room", "small_room")
    signature |= dict.fromkeys(scalars, "i32")
    name = f"plan {'dense' if dense else 'csr'} m{form.block_m}/{form.small_m}"
    constants = plan_constants(spec, _config(form), dense, launches_early(arch))
    return _build(name, plan_kernel, signature, {"C": constants}, options=plan_options(arch))


def _append(spec: AttentionSpec) -> KernelBuild:
    from octavo.kernels.append import append_kernel

    signature: Signature = dict.fromkeys(("k", "v", "k_cache", "v_cache"), POINTERS[spec.dtype])
    signature |= dict.fromkeys(("qo_indptr", "kv_ptr", "last_page_len", "page_table"), "*i32")
    scalars = ("table_stride", "entries", "num_tokens", "num_sequences", "num_pages", "steps")
    signature |= dict.fromkeys(scalars, "i32")
    signature |= dict.fromkeys(("k_in_strides", "v_in_strides"), ("i32",) * 2)
    signature |= dict.fromkeys(("k_strides", "v_strides"), ("i32",) * 3)
    constants = append_constants(spec.page_size, spec.head_dim, spec.v_dim, dense=False)
    return _build("append", append_kernel, signature, constants)


def _merge(spec: AttentionSpec, states: int) -> KernelBuild:
    from octavo.kernels.merge import merge_kernel

    data = POINTERS[spec.dtype]
    signature: Signature = {"outs": (data,) * states, "lses": ("*fp32",) * states, "out": data, "lse": "*fp32"}
    signature |= {"out_strides_in": (("i32", "i32"),) * states, "lse_strides_in": (("i32", "one"),) * states}
    signature |= {"out_strides": ("i32", "i32"), "lse_strides": ("i32", "one"), "num_rows": "i32"}
    return _build("merge", merge_kernel, signature, merge_constants(spec.num_qo_heads, spec.v_dim))
