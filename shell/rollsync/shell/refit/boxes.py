"""Boxes of elements and regions of bytes on real tensors, for the side that cuts parts out and the
side that puts them together. Rule kept here: both are views, and nothing is copied.
"""

import torch

from rollsync.pure.refit.layout import Box
from rollsync.pure.refit.load_plan import Region


def inside(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The view of a box of a tensor's elements."""
    for dimension, (start, size) in enumerate(zip(box.starts, box.sizes, strict=True)):
        if size != tensor.shape[dimension]:
            tensor = tensor.narrow(dimension, start, size)
    return tensor


def bytes_of(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """The bytes of a region of a contiguous tensor: uint8, one row for each run."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    stride = region.stride_bytes if region.runs > 1 else region.run_bytes
    return flat.as_strided(
        (region.runs, region.run_bytes), (stride, 1), flat.storage_offset() + region.offset
    )
