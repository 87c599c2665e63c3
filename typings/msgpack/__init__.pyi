from collections.abc import Callable

from msgpack import exceptions as exceptions

def packb(o: object) -> bytes: ...
def unpackb(
    packed: bytes,
    *,
    object_pairs_hook: Callable[[list[tuple[object, object]]], object],
    strict_map_key: bool,
) -> object: ...
