"""Where the files of a model keep an array."""

from collections.abc import Container, Sequence
from typing import Any, NamedTuple


class FileTensor(NamedTuple):
    """How the files store one array of a model, or one layer of a Stack's array.

    Attributes:
      names: The tensor's name in the files; of several, the array is their stack along
        a new first axis, as experts are. None at all if the files lack the array, like
        a LoRA adapter: it keeps its initial value.
      transposed: Whether the last two dimensions are swapped in the files, as those of
        PyTorch's Linear are.
      convolution: Whether the last four dimensions, height, width, input and output,
        are output, input, height and width in the files, as in PyTorch's Conv2d.
      older: Other names of the tensors, each a tuple like `names`, that some files have
        instead; none is written.
      part: Which of how many equal parts of the tensor's first dimension in the files
        the array is: queries are (0, 3) where they lie before keys and values.
    """

    names: tuple[str, ...]
    transposed: bool = False
    convolution: bool = False
    older: tuple[tuple[str, ...], ...] = ()
    part: tuple[int, int] = (0, 1)

    def named_as_in(self, found: Container[str]) -> "FileTensor":
        """Returns this with those of its names that are all among `found`."""
        for names in (self.names, *self.older):
            if all(name in found for name in names):
                return self._replace(names=names, older=())
        return self._replace(older=())

    def shape_in_file(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of each tensor of an array of this shape."""
        shape = shape[len(self.names) > 1 :]
        found = [shape[axis] for axis in self.axes(len(shape))]
        found[:1] = [size * self.part[1] for size in found[:1]]
        return tuple(found)

    def is_for(self, shape: Sequence[int]) -> bool:
        """Returns whether an array of this shape can be stored so."""
        count = len(self.names)
        inner = shape[count > 1 :]
        stacked = count <= 1 or (len(shape) > 0 and shape[0] == count)
        return stacked and len(inner) >= self._least_dims

    def is_part_of(self, shape: Sequence[int]) -> bool:
        """Returns whether a tensor of the files of this shape can have the array."""
        count = self.part[1]
        divided = count == 1 or (len(shape) > 0 and shape[0] % count == 0)
        return divided and len(shape) >= self._least_dims

    @property
    def _least_dims(self) -> int:
        return 4 if self.convolution else 2 if self.transposed else 0

    def axes(self, ndim: int) -> list[int]:
        """Returns the order of an array's dimensions in the files."""
        order = list(range(ndim))
        if self.transposed:
            order[-2:] = order[-1], order[-2]
        if self.convolution:
            height, width, size_in, size_out = order[-4:]
            order[-4:] = size_out, size_in, height, width
        return order

    def from_file(self, tensor: Any) -> Any:
        """Returns a tensor of the files, or a view of it, with our dimensions."""
        tensor, axes = self.of_tensor(tensor), self.axes(tensor.ndim)
        return tensor.transpose([axes.index(i) for i in range(tensor.ndim)])

    def of_tensor(self, tensor: Any) -> Any:
        """Returns the part of a tensor of the files that is this array's."""
        number, count = self.part
        if count == 1:
            return tensor
        size = tensor.shape[0] // count
        return tensor[number * size : (number + 1) * size]
