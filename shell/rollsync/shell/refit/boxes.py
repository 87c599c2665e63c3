"""Boxes of elements on real tensors, for the side that cuts parts out and the side that puts them
together. Rule kept here: a box is a view, and nothing is copied.
"""

import torch

from rollsync.pure.refit.layout import Box


def inside(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The view of a box of a tensor's elements."""
    for dimension, (start, size) in enumerate(zip(box.starts, box.sizes, strict=True)):
        if size != tensor.shape[dimension]:
            tensor = tensor.narrow(dimension, start, size)
    return tensor
