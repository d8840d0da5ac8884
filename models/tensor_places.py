"""Where the files of PyTorch's models keep the arrays of a layer."""

from jshard.storage.hub.file_tensor import FileTensor

_NORM = {
    "scale": "weight",
    "bias": "bias",
    "mean": "running_mean",
    "var": "running_var",
}


def linear(ours: str, theirs: str, bias: bool = True) -> dict[str, FileTensor]:
    """Returns where the files keep a linear layer."""
    found = {f"{ours}.kernel": FileTensor((f"{theirs}.weight",), transposed=True)}
    return found | _bias(ours, theirs) if bias else found


def convolution(ours: str, theirs: str, bias: bool = True) -> dict[str, FileTensor]:
    """Returns where the files keep a convolution."""
    found = {f"{ours}.kernel": FileTensor((f"{theirs}.weight",), convolution=True)}
    return found | _bias(ours, theirs) if bias else found


def norm(ours: str, theirs: str) -> dict[str, FileTensor]:
    """Returns where the files keep a batch norm, with its statistics."""
    return {
        f"{ours}.{own}": FileTensor((f"{theirs}.{name}",))
        for own, name in _NORM.items()
    }


def layer_norm(ours: str, theirs: str) -> dict[str, FileTensor]:
    """Returns where the files keep a layer norm."""
    scale = {f"{ours}.scale": FileTensor((f"{theirs}.weight",))}
    return scale | _bias(ours, theirs)


def _bias(ours: str, theirs: str) -> dict[str, FileTensor]:
    return {f"{ours}.bias": FileTensor((f"{theirs}.bias",))}
