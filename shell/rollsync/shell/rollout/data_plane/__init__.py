"""Rows of tensors by partition and key: the protocol, the plane in this process, and its checks.

Only the names that every user needs are exported; `conformance` is imported by adapters' tests.
"""

from rollsync.shell.rollout.data_plane.in_process import InProcessDataPlane
from rollsync.shell.rollout.data_plane.protocol import DataPlane, PinnedRows, Row, StoredRow, Tags

__all__ = ["DataPlane", "InProcessDataPlane", "PinnedRows", "Row", "StoredRow", "Tags"]
