"""A box of elements is a view of them."""

import torch

from rollsync.pure.refit.layout import Box
from rollsync.shell.refit.boxes import inside


def test_a_box_is_a_view_of_its_elements() -> None:
    tensor = torch.arange(24).reshape(2, 3, 4)
    view = inside(tensor, Box((0, 1, 2), (2, 2, 1)))
    assert view.tolist() == [[[6], [10]], [[18], [22]]]
    view.zero_()
    assert tensor[:, 1:, 2].sum() == 0
    assert inside(tensor, Box((0, 0, 0), (2, 3, 4))) is tensor


def test_a_tensor_without_dimensions_is_its_own_box() -> None:
    assert inside(torch.tensor(7), Box((), ())).item() == 7
