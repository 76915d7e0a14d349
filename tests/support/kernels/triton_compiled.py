"""Triton's kernels through its compiler, as a real launch would have them compiled. No GPU runs them.

    python -m tests.support.kernels.triton_compiled 90 bf16 product up  # capability, numbers, kernels by name

prints, as JSON, of each kernel: registers and spilled bytes of a thread, bytes of shared memory, threads,
whether loads from global memory are of 128 bits, and which conversions and tensor core instructions it has.
"""

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from megamoe.kernels.triton import (
    adamw,
    block,
    common,
    cross_entropy,
    experts,
    products,
    router,
    router_sums,
    rows,
)
from megamoe.kernels.triton.common import LARGEST_BLOCK, tile_of

# Kinds of arguments that are no numbers of the model's dtype ("x"); of a multiple of 16 as pointers are, and
# as sizes of models are.
FP32, INDEX, COUNT, SIZE, ANY_SIZE, REAL = "*fp32", "*i64", "*i32", "i32*16", "i32", "fp32"


def product(kind: str = "product", **constants: Any) -> Callable[[int, int], dict[str, Any]]:
    """The constants of a product of that kind on the GPUs of a capability, for numbers of `size` bytes."""

    def of(capability: int, size: int) -> dict[str, Any]:
        precision = {"PRECISION": "ieee" if size == 4 else "tf32"}
        return {**tile_of(kind, size, capability // 10).options(), **precision, **constants}

    return of


def fixed(**constants: Any) -> Callable[[int, int], dict[str, Any]]:
    return lambda capability, size: constants


@dataclasses.dataclass(frozen=True)
class Launch:
    """kinds: of the arguments that are no constants, in order; "x" is a pointer to the model's numbers."""

    kernel: Any
    kinds: str
    constants: Callable[[int, int], dict[str, Any]]


KINDS = {"x": "x", "f": FP32, "i": INDEX, "c": COUNT, "s": SIZE, "a": ANY_SIZE, "r": REAL}
MANY = 64  # experts
ROW: dict[str, Any] = {"ROWS": 1, "BLOCK": 2048}
PRECISION = {"PRECISION": router.PRECISION}
OF_SCORES = {"WEIGHT_IS_OUT_IN": True, "COLUMNS": MANY, **PRECISION, **router.SCORES}
OF_ROWS = {"WEIGHT_IS_OUT_IN": False, **PRECISION, **router.TO_ROWS}
OF_WEIGHT = {"ROWS": router.EXPERTS_OF_A_GRADIENT, **PRECISION, **router.TO_WEIGHT}
OF_TOKENS = {"ROWS": router_sums.TOKENS, "EXPERTS": MANY}
OF_PAIRS = {"ROWS": rows.NUMBERS // MANY, "EXPERTS": MANY}
LAUNCHES: dict[str, Launch] = {
    "combine": Launch(rows._combine, "xiifsx", fixed(BLOCK=LARGEST_BLOCK)),
    "combine_odd": Launch(rows._combine, "xiifax", fixed(BLOCK=LARGEST_BLOCK)),
    "combine_backward": Launch(rows._combine_backward, "xxifsxf", fixed(BLOCK=LARGEST_BLOCK)),
    "swiglu": Launch(experts._swiglu, "xsx", fixed(BLOCK=LARGEST_BLOCK, weight=None)),
    "weighted_swiglu": Launch(experts._swiglu, "xsxf", fixed(BLOCK=LARGEST_BLOCK)),
    "swiglu_backward": Launch(
        experts._swiglu_backward, "xxsx", fixed(BLOCK=LARGEST_BLOCK, weight=None, to_weight=None)
    ),
    "weighted_swiglu_backward": Launch(experts._swiglu_backward, "xxsxff", fixed(BLOCK=LARGEST_BLOCK)),
    "forward": Launch(products._product, "xxisssx", product(EXPERTS=MANY, WEIGHT_IS_OUT_IN=True)),
    "to_rows": Launch(products._product, "xxisssx", product(EXPERTS=MANY, WEIGHT_IS_OUT_IN=False)),
    "to_weight": Launch(products._to_weight, "xxissx", product("to_weight")),
    "up": Launch(experts._up, "xxisssxx", product("up", EXPERTS=MANY, weight=None)),
    "weighted_up": Launch(experts._up, "xxisssxxf", product("up", EXPERTS=MANY)),
    "down_backward": Launch(
        experts._down_backward, "xxisssxx", product("down_backward", EXPERTS=MANY, weight=None, parts=None)
    ),
    "weighted_down_backward": Launch(
        experts._down_backward, "xxisssxxff", product("weighted_down_backward", EXPERTS=MANY)
    ),
    "rms_norm": Launch(block._rms_norm, "xxasrxf", fixed(**ROW, added=None, sum=None)),
    "summed_rms_norm": Launch(block._rms_norm, "xxxasrxxf", fixed(**ROW)),
    "rms_norm_backward": Launch(block._rms_norm_backward, "xxxfasxf", fixed(**ROW, sent_to_sum=None)),
    "summed_rms_norm_backward": Launch(block._rms_norm_backward, "xxxxfasxf", fixed(**ROW)),
    "sum_parts": Launch(common._sum_parts, "fasx", fixed(ROWS=common.PARTS, BLOCK=common.COLUMNS)),
    "router_scores": Launch(router._fp32_product, "xxassf", fixed(**OF_SCORES)),
    "router_to_rows": Launch(router._fp32_product, "fxassx", fixed(**OF_ROWS)),
    "router_to_weight": Launch(router._to_weight, "fxassf", fixed(**OF_WEIGHT)),
    "top_k": Launch(router._top_k, "fasi", fixed(COUNT=2, ROWS=router.TOKENS_OF_A_PASS, EXPERTS=MANY)),
    "chosen_weights": Launch(
        router._chosen_weights, "ffiassrrrrf", fixed(ROWS=router.TOKENS_OF_A_PASS, CHOICES=8)
    ),
    **{
        f"chosen_weights_backward_{experts}": Launch(
            router._chosen_weights_backward,
            "fffiasrrrrff",
            fixed(ROWS=router.NUMBERS_OF_A_GRADIENT // experts, EXPERTS=experts, CHOICES=8),
        )
        for experts in (128, 512)
    },
    "z_loss": Launch(router_sums._z_loss, "fasff", fixed(**OF_TOKENS)),
    "z_loss_backward": Launch(router_sums._z_loss_backward, "fffasf", fixed(**OF_TOKENS)),
    "balance_loss": Launch(router_sums._balance_loss, "fiasff", fixed(**OF_TOKENS)),
    "gate_sums": Launch(router_sums._gate_sums, "fiassafc", fixed(**OF_TOKENS, BINS=2 * MANY)),
    "pairs_ends": Launch(rows._ends, "isaai", fixed(BLOCK=rows.TOKENS)),
    "pairs_count": Launch(rows._count, "issc", fixed(**OF_PAIRS)),
    "pairs_add_up": Launch(rows._add_up, "casi", fixed(BLOCK=rows.BLOCKS)),
    "pairs_place": Launch(rows._place, "iificssiiifi", fixed(**OF_PAIRS)),
    "rotate": Launch(block._rotate, "xxxxff" + 12 * "s" + "aasr", fixed(HEADS=16, BLOCK=64)),
    "adamw": Launch(adamw._adamw, "ffffffsf", fixed(BLOCK=adamw.BLOCK)),
    "adamw_of_bf16": Launch(adamw._adamw, "fxxxffsx", fixed(BLOCK=adamw.BLOCK)),
    "cross_entropy": Launch(cross_entropy._statistics, "xisffff", fixed(BLOCK=4096, num_warps=8)),
    "cross_entropy_backward": Launch(cross_entropy._gradient, "xifffsrr", fixed(BLOCK=4096, num_warps=8)),
}


def compiled(launch: Launch, capability: int, number: str) -> Any:
    constants = launch.constants(capability, 4 if number == "fp32" else 2)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
    names = [name for name in launch.kernel.arg_names if name not in constants]
    kinds = [KINDS[letter] for letter in launch.kinds]
    kinds = [f"*{number}" if kind == "x" else kind for kind in kinds]
    by_name = dict(zip(names, kinds, strict=True))
    signature = {name: by_name.get(name, "constexpr").removesuffix("*16") for name in launch.kernel.arg_names}
    places = {name: place for place, name in enumerate(launch.kernel.arg_names)}
    hinted = [name for name, kind in by_name.items() if kind.startswith("*") or kind.endswith("*16")]
    attributes = {(places[name],): [["tt.divisibility", 16]] for name in hinted}
    source = triton.compiler.ASTSource(launch.kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(ptx: str, capability: int) -> dict[str, int]:
    """Registers, and bytes of spilled registers, by NVIDIA's assembler."""
    from triton.backends.nvidia.compiler import get_ptxas

    assembler = Path(get_ptxas(capability).path)  # whose version the PTX was written for
    target = re.search(r"\.target\s+(\w+)", ptx)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [str(assembler), "-v", f"--gpu-name={target[1]}", str(path), "-o", f"{folder}/out"]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stderr
    patterns = {"registers": r"Used (\d+) registers", "spilled": r"(\d+) bytes spill stores"}
    return {
        key: int(found[1]) if (found := re.search(pattern, shown)) else 0 for key, pattern in patterns.items()
    }


def facts(name: str, capability: int, number: str) -> dict[str, Any]:
    kernel = compiled(LAUNCHES[name], capability, number)
    ptx = kernel.asm["ptx"]
    return {
        **resources(ptx, capability),
        "shared": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "vector_loads": bool(
            re.search(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64|cp\.async\S* .*0x10", ptx)
        ),
        "narrow_loads": len(re.findall(r"ld\.global(?!\S*\.v[24])\S*\.b16", ptx)),
        "tensor_cores": sorted(set(re.findall(r"wgmma\.mma|tcgen05\.mma|mma\.sync", ptx))),
        "rounds": "cvt.rn.bf16" in ptx,
        "cuts_off": "cvt.rz.bf16" in ptx,
    }


def main() -> None:
    capability, number, *names = sys.argv[1:]
    names = names or [name for name in LAUNCHES if not name.endswith("_odd")]
    print(json.dumps({name: facts(name, int(capability), number) for name in names}))


if __name__ == "__main__":
    main()
