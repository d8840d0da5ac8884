"""Published times of single kernels: one layer of Llama 2 70B on H100s.

The profile that guides XLA's schedule of MaxText's run on 512 GPUs, four sequences of
4096 tokens each: AI-Hypercomputer/maxtext
MaxText/configs/a3/llama_2_70b/bf16/pgle/64vm.pbtxt at a64a93f95543. It was taken with
collectives that nothing ran beside, so kernels had the GPU, and more of its power, to
themselves. The names are XLA's; shapes follow from the model, and kernels whose shape
does not are left out. Those of products in float8 are from the run on 1,024 GPUs,
MaxText/configs/a3/llama_2_70b/fp8/pgle/128vm.pbtxt at f632bc5381fb: the products of the
MLP, each cublas-gemm of more than 4 ms.
"""

from typing import Any

_TOKENS, _WIDTH, _KV, _HIDDEN = 4 * 4096, 8192, 1024, 28672
_LAYERS, _HEADS, _LENGTH, _HEAD = 80, 64, 4096, 128

# Microseconds of products, by the two sizes beside the tokens, forward then backward.
_PRODUCTS = {
    (_WIDTH, _HIDDEN): (
        10284.3, 10287.6, 9783.5,
        10302.0, 10313.7, 9869.1, 10462.4, 9799.5, 9387.3, 9462.8, 9376.7,
    ),
    (_WIDTH, _WIDTH): (
        3045.0, 2948.7, 3038.9, 2966.7, 2733.4, 2688.7, 2373.1,
    ),
    (_WIDTH, _KV): (376.4, 376.8, 351.1, 319.9, 336.4, 413.4),
}  # fmt: skip
_FLOAT8_PRODUCTS = (
    5099.5, 5105.5, 5617.4, 5093.3, 4965.6, 5100.4, 4714.4, 5070.9, 4701.5, 4735.2,
    4703.6, 5110.9, 4978.0, 5105.6, 4749.8, 5089.5, 4847.5, 4864.1, 4988.5, 5104.3,
    4995.4, 5096.2, 5580.7, 5766.2, 5159.6, 5163.6, 5103.4, 5079.0, 5084.4, 5578.2,
)  # fmt: skip
# A forward, and a backward with the kernels before and after it.
_ATTENTION = 1944.5 + 5431.6 + 275.9 + 100.8 + 198.4
# Bytes and microseconds: bf16 activations of a layer, and stacks of all layers'.
_X, _K, _F = (2 * _TOKENS * size for size in (_WIDTH, _KV, _HIDDEN))
_MEMORY = {
    "SwiGLU": (3 * _F, 901.9),
    "norm 1, sum of squares": (_X, 90.3),
    "norm 2, sum of squares": (_X, 85.1),
    "norm 1, scale": (2 * _X, 192.2),
    "norm 2, scale": (2 * _X, 191.6),
    "queries, rotary": (2 * _X, 318.3),
    "keys, rotary": (2 * _K, 41.4),
    "inputs, into their stack": (2 * _X, 632.7),
    "queries, into their stack": (2 * _X, 632.3),
    "keys, into their stack": (2 * _K, 80.6),
    "values, into their stack": (2 * _K, 80.6),
    "stack of inputs, cleared": (_LAYERS * _X, 6733.5),
    "stack of keys, cleared": (_LAYERS * _K, 839.4),
}


def kernels() -> dict[str, dict[str, dict[str, Any]]]:
    """By part and kernel, as the stage "kernels" of ``benchmarks/gpu.py`` has them."""
    scores = 4 * _HEADS * _LENGTH * _LENGTH
    return {
        "products": {
            f"bf16 {_TOKENS}x{a}x{b}, {number}": {
                "flops": 2.0 * _TOKENS * a * b,
                "seconds": microseconds * 1e-6,
            }
            for (a, b), found in _PRODUCTS.items()
            for number, microseconds in enumerate(found)
        }
        | {
            f"fp8 {_TOKENS}x{_WIDTH}x{_HIDDEN}, {number}": {
                "flops": 2.0 * _TOKENS * _WIDTH * _HIDDEN,
                "seconds": microseconds * 1e-6,
            }
            for number, microseconds in enumerate(_FLOAT8_PRODUCTS)
        },
        "attention": {
            # Seven products of B N T T H, causal.
            "forward and backward": {
                "flops": 2.0 * 7 * scores * _HEAD / 2,
                "seconds": _ATTENTION * 1e-6,
            }
        },
        "memory": {
            name: {"bytes": nbytes, "seconds": microseconds * 1e-6}
            for name, (nbytes, microseconds) in _MEMORY.items()
        },
    }
