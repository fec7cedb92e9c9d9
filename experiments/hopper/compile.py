"""Compile the kernel's forms for sm_90 without a GPU and print what they became: `python compile.py [FORM…]`."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import attention_hopper
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

CONSTANTS = {
    "GROUP": 8, "D": 128, "PAGE_SIZE": 1, "CAUSAL": True, "RUNS": 0, "BLOCK_N": 128, "SLOTS": 2, "STAGES": 2,
    "FENCE": False, "ATTEND_REGISTERS": 216, "LOAD_REGISTERS": 72,
}  # fmt: skip
FORMS = {
    "base": {},
    "runs": {"RUNS": 1},
    "runs in a page": {"RUNS": 2, "PAGE_SIZE": 64},
    "d64": {"D": 64},
    "d256": {"D": 256, "BLOCK_N": 64, "SLOTS": 1},
    "page 16, group 5": {"PAGE_SIZE": 16, "GROUP": 5},
    "fence": {"FENCE": True},
}
DATA, ALIGNED = ("q", "k_cache", "v_cache", "out"), ("q", "k_cache", "v_cache", "out", "tensor_maps")
POINTERS = {"lse": "*fp32", "plan": "*i32", "page_table": "*i32", "tensor_maps": "*i8", "scale_log2": "fp32"}


def tool(name: str, *arguments: str) -> str:
    path = Path(triton.__path__[0]) / "backends/nvidia/bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def compile_form(name: str, dtype: str = "*bf16") -> None:
    constants = {**CONSTANTS, **FORMS[name]}
    kernel = attention_hopper.attention_hopper_kernel
    signature, constexprs = {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants or argument == "scale":
            signature[argument], constexprs[(i,)] = "constexpr", constants.get(argument)
        else:
            signature[argument] = dtype if argument in DATA else POINTERS.get(argument, "i32")
    aligned = {(i,): [["tt.divisibility", 16]] for i, argument in enumerate(kernel.arg_names) if argument in ALIGNED}
    source = GluonASTSource(kernel, signature, constexprs, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, sass = tool("cuobjdump", "-res-usage", file.name), tool("nvdisasm", "-c", file.name)
    counts = {m: len(re.findall(rf"\b{m}\b", sass)) for m in ("HGMMA", "LDGSTS", "UTMALDG", "LDL", "STL")}
    print(name, re.findall(r"REG:\d+|STACK:\d+", usage), compiled.metadata.shared, counts, flush=True)


if __name__ == "__main__":
    for form in sys.argv[1:] or FORMS:
        compile_form(form)
