"""Published step times of MaxText on NVIDIA's GPUs: XLA:GPU, cuBLAS, cuDNN's attention.

Each run has its configuration, flags and network as its source states them. All
compute in bf16 with float32 weights and moments and MaxText's "fsdp" sharding, and
embed tokens by a product (``use_iota_embed``). XLA's flags that JAX 0.10 no longer has
are left out.
"""

import dataclasses
from typing import Any

import gspmd
from compiling import Row

MIB = 2**20
_IOTA = ("iota", True)
_UNROLLED = ("scan", False)

# Gb/s of the network for each GPU. A3: 4 ports of 200 Gb/s for 8 GPUs; A3 Mega: 8 of
# 200; DGX H100 and A3 Ultra: 8 of 400 (the vendors' specifications).
A3, A3_MEGA, DGX, A3_ULTRA = 100, 200, 400, 400

_A3_SOURCE = (
    "AI-Hypercomputer/maxtext MaxText/configs/a3/llama_2_7b/README.md, *vm.sh at "
    "efb6d9e4a285"
)
_A3_MEGA_SOURCE = (
    "AI-Hypercomputer/gpu-recipes training/a3mega/llama-2-7b/maxtext-pretraining-gke/"
    "README.md at d57d2223fa11"
)
_TOOLBOX_SOURCE = (
    "NVIDIA/JAX-Toolbox docs/frameworks/maxtext/README.md, example_slurm.sub at "
    "bcbbfa578be9"
)
_LLAMA2_SOURCE = (
    "NVIDIA/dgxc-benchmarking maxtext/README_70b.md, configure.sh at 143b90dd91f9"
)
_LLAMA3_SOURCE = (
    "NVIDIA/dgxc-benchmarking maxtext/README_70b.md, configure.sh at 0efdb235ac32"
)
_A3_ULTRA_SOURCE = (
    "AI-Hypercomputer/gpu-recipes training/a3ultra/llama3-1-70b/"
    "maxtext-pretraining-gke/README.md, values.yaml at 2e1fd5efbf1a"
)
_MIXTRAL_SOURCE = (
    "AI-Hypercomputer/gpu-recipes training/a3ultra/mixtral-8x7b/"
    "maxtext-pretraining-gke/README.md, values.yaml at 611d8ffdf3d5"
)


@dataclasses.dataclass(frozen=True)
class Run:
    """A measured step.

    Attributes:
      name: short, and of the file that caches its program.
      row: the program.
      combined: MiB up to which all-reduces, all-gathers and reduce-scatters are
        combined.
      seconds: a step, measured.
      network: Gb/s of a GPU's own port.
      memory: share of the GPU's memory that XLA was given, which bounds its schedule.
      source: repository, path, commit.
      guided: whether a profile of its kernels guided XLA's schedule (PGLE).
    """

    name: str
    row: Row
    combined: tuple[int, int, int]
    seconds: float
    network: int
    memory: float
    source: str
    guided: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """XLA's, as it was run."""
        kinds = ("all_reduce", "all_gather", "reduce_scatter")
        return (
            gspmd.MAXTEXT_OPTIONS
            | {
                f"xla_gpu_{kind}_combine_threshold_bytes": size * MIB
                for kind, size in zip(kinds, self.combined, strict=True)
            }
            | {
                # Per cent of what XLA's scheduler takes an absent GPU to have: 0.8.
                "xla_gpu_memory_limit_slop_factor": round(95 * self.memory / 0.8)
            }
        )


def _row(recipe: str, topology: str, remat: str, batch: int, **others: Any) -> Row:
    return Row(
        system="gspmd",
        rules="maxtext",
        recipe=recipe,
        topology=topology,
        remat=remat,
        batch=batch,
        **others,
    )


def _a3(hosts: int, combined: tuple[int, int, int], tflops: float) -> Run:
    """The published figure is TFLOP/s a GPU, by MaxText's count of that commit.

    That is 6 N a token with all parameters, and half of 12 L D T for causal attention.
    """
    parameters, layers, width, length, batch = 6_738_415_616, 32, 4096, 4096, 4
    a_token = 6 * parameters + 6 * layers * width * length
    return Run(
        f"7B on {8 * hosts}, A3",
        _row(
            "llama:2-7b",
            f"h100:{8 * hosts}",
            "minimal_flash",
            batch,
            strategy="hybrid" if hosts > 1 else "zero3",
            form=(_UNROLLED, _IOTA),
        ),
        combined,
        a_token * batch * length / (tflops * 1e12),
        A3,
        0.85,
        _A3_SOURCE,
    )


def _llama2_70b(gpus: int, fsdp: int, seconds: float, products: str = "") -> Run:
    model = (("vocab_size", 32000), ("sequence_length", 4096))
    name, source = f"70B on {gpus}, DGX", _LLAMA2_SOURCE
    remat, combined = "save_dot_except_mlpwi", (2048, 2048, 16 if gpus >= 512 else 32)
    if products:
        remat, combined = "save_dot_except_mlp", (1024, 512, 4 if gpus >= 512 else 8)
    return _70b(name, remat, gpus, fsdp, seconds, source, combined, model, products)


def _llama3_70b(gpus: int, fsdp: int, seconds: float, products: str = "") -> Run:
    name, source = f"Llama 3 70B on {gpus}, DGX", _LLAMA3_SOURCE
    combined = (2048, 2048, (32 if gpus >= 512 else 64) // (1 if products else 2))
    return _70b(
        name, "save_qkv_proj", gpus, fsdp, seconds, source, combined, (), products
    )


def _70b(
    name: str,
    remat: str,
    gpus: int,
    fsdp: int,
    seconds: float,
    source: str,
    combined: tuple[int, int, int],
    model: tuple[tuple[str, Any], ...],
    products: str,
) -> Run:
    row = _row(
        "llama:3-70b",
        f"h100:{gpus}",
        remat,
        2,
        strategy="zero3" if fsdp == gpus else "hybrid",
        fsdp=None if fsdp == gpus else fsdp,
        model=model,
        form=(_IOTA,),
        products=products or None,
    )
    if products:
        name, source = f"{name}, float8", f"{source}, float8"
    return Run(name, row, combined, seconds, DGX, 0.94, source, guided=True)


_MIXTRAL = (
    ("num_experts", 8),
    ("hidden", 14336),
    ("num_kv_heads", 8),
    ("vocab_size", 32000),
    ("sequence_length", 4096),
    ("param_dtype", "bfloat16"),
)


@dataclasses.dataclass(frozen=True)
class Other:
    """A run of another system, with other kernels, beside jshard's own step.

    Attributes:
      name: short.
      row: jshard's step of the same model.
      tokens: a GPU's in a step.
      speed: tokens/s a GPU, measured.
      source: who measured it.
    """

    name: str
    row: Row
    tokens: int
    speed: float
    source: str


_UNROLLED_LAYERS = (("unroll", True),)  # as in the recipes

# No constant follows from these.
OTHERS = (
    Other(
        "GPT-2 124M, 8 H100s",
        Row(
            recipe="gpt2_124m",
            topology="h100:8",
            remat="none",
            batch=64,
            policy=_UNROLLED_LAYERS,
        ),
        64 * 1024,
        468e3,
        "llm.c",
    ),
    Other(
        "Llama 1B, one H100",
        Row(
            recipe="llama:3-1b",
            topology="h100:1",
            remat="none",
            batch=4,
            model=(("sequence_length", 4096),),
            policy=_UNROLLED_LAYERS,
        ),
        4 * 4096,
        42e3,
        "4096 tokens a sequence are assumed",
    ),
    Other(
        "8B of Llama 3's shape, one H200",
        Row(
            recipe="llama:3-8b",
            topology="h200:1",
            remat="full",
            batch=8,
            model=(("sequence_length", 4096),),
            policy=(("accumulate", 4), *_UNROLLED_LAYERS),
        ),
        8 * 4096,
        10471,
        "KempnerForge",
    ),
    Other(
        "Llama 3 8B float8, 8 H100s",
        Row(
            recipe="llama:3-8b",
            topology="h100:8",
            remat="dots",
            products="float8",
            policy=_UNROLLED_LAYERS,
        ),
        8192,
        14451,
        "Megatron-Bridge, Megatron-FSDP",
    ),
    Other(
        "Llama 3 8B float8, 32 H200s",
        Row(
            recipe="llama:3-8b",
            topology="h200:32",
            remat="dots",
            batch=2,
            products="float8",
            policy=_UNROLLED_LAYERS,
        ),
        2 * 8192,
        10938,
        "torchtitan",
    ),
)

RUNS = (
    Run(
        "7B on 8, DGX",
        _row("llama:2-7b", "h100:8", "minimal_flash", 2, form=(_UNROLLED, _IOTA)),
        (1024, 1024, 128),
        0.721,
        DGX,
        0.90,
        _TOOLBOX_SOURCE,
    ),
    _a3(1, (128, 128, 64), 492),
    _a3(2, (64, 128, 64), 422),
    _a3(4, (512, 128, 64), 407),
    _a3(8, (1024, 128, 64), 409),
    _a3(16, (1024, 128, 128), 375),
    Run(
        "7B on 256, A3 Mega",
        _row(
            "llama:2-7b",
            "h100:256",
            "minimal_flash",
            4,
            strategy="hybrid",
            form=(_UNROLLED, _IOTA),
        ),
        (512, 128, 64),
        1.500,
        A3_MEGA,
        0.90,
        _A3_MEGA_SOURCE,
    ),
    _llama2_70b(64, 64, 6.999),
    _llama2_70b(128, 128, 7.072),
    _llama2_70b(256, 256, 7.153),
    _llama2_70b(512, 128, 7.091),
    _llama2_70b(64, 64, 4.324, "float8"),
    _llama2_70b(128, 128, 4.556, "float8"),
    _llama2_70b(256, 256, 4.959, "float8"),
    _llama2_70b(512, 128, 5.043, "float8"),
    _llama3_70b(128, 128, 15.563),
    _llama3_70b(256, 256, 15.444),
    _llama3_70b(512, 128, 15.519),
    _llama3_70b(128, 128, 9.074, "float8"),
    _llama3_70b(256, 256, 9.488, "float8"),
    _llama3_70b(512, 128, 9.244, "float8"),
    Run(
        "Llama 3.1 70B on 256 H200, A3 Ultra",
        _row(
            "llama:3-70b",
            "h200:256",
            "save_dot_with_context_except_mlp",
            2,
            strategy="hybrid",
            fsdp=128,
            form=(_IOTA,),
        ),
        (2048, 2048, 16),
        15.516,
        A3_ULTRA,
        0.98,
        _A3_ULTRA_SOURCE,
    ),
)

# What no constant is fitted to: sizes that the fit has not seen, and the one run with
# experts. Its layers are written out, as they were.
APART = (
    _llama2_70b(1024, 128, 7.084),
    _llama2_70b(2048, 128, 7.066),
    _llama2_70b(1024, 128, 5.062, "float8"),
    _llama2_70b(2048, 128, 4.93, "float8"),
    _llama3_70b(1024, 128, 15.603),
    _llama3_70b(2048, 128, 15.898),
    _llama3_70b(1024, 128, 9.483, "float8"),
    _llama3_70b(2048, 128, 9.339, "float8"),
    Run(
        "Mixtral 8x7B on 256 H200, A3 Ultra",
        _row(
            "llama:2-7b",
            "h200:256",
            "save_dot",
            5,
            strategy="hybrid",
            fsdp=2,
            expert=8,
            model=_MIXTRAL,
            form=(_IOTA, _UNROLLED),
        ),
        (68, 512, 128),
        3.437,
        A3_ULTRA,
        0.98,
        _MIXTRAL_SOURCE,
    ),
)
