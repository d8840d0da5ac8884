"""Where a Hugging Face folder keeps an array of a model."""

from typing import NamedTuple


class FileTensor(NamedTuple):
    """How the files store one array of a model, or one layer of a Stack's array.

    Attributes:
      names: The tensor's name in the files; of several, the array is their stack along
        a new first axis, as experts are.
      transposed: Whether the last two dimensions are swapped in the files, as those of
        PyTorch's Linear are.
    """

    names: tuple[str, ...]
    transposed: bool = False
