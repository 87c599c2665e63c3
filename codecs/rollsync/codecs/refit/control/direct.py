"""The messages about what a receiver reads itself, between domain and wire."""

from __future__ import annotations

from typing import assert_never

from rollsync.codecs.refit.control import v2
from rollsync.pure.refit import control
from rollsync.pure.refit.load_plan import Region

DirectBody = (
    v2.ProbeOffered
    | v2.DestinationsOffered
    | v2.DestinationsAnswered
    | v2.DestinationsReported
    | v2.TensorsOffered
    | v2.TensorHashed
    | v2.TensorsTaken
)


def destination_to_wire(destination: control.Destination) -> v2.Destination:
    """The wire struct."""
    return v2.Destination(
        name=destination.name,
        shape=destination.shape,
        dtype=destination.dtype,
        regions=tuple(
            v2.Region(
                offset=each.offset,
                run_bytes=each.run_bytes,
                runs=each.runs,
                stride_bytes=each.stride_bytes,
            )
            for each in destination.regions
        ),
    )


def body_from_wire(wire: DirectBody) -> control.ControlBody:
    """The message's body."""
    match wire:
        case v2.ProbeOffered():
            return control.ProbeOffered(
                agent=wire.agent, address=wire.address, contents=wire.contents
            )
        case v2.DestinationsOffered():
            return control.DestinationsOffered(digest=wire.digest)
        case v2.DestinationsAnswered():
            return control.DestinationsAnswered(known=wire.known)
        case v2.DestinationsReported():
            return control.DestinationsReported(
                destinations=tuple(_destination(each) for each in wire.destinations)
            )
        case v2.TensorsOffered():
            return control.TensorsOffered(
                offer=wire.offer,
                agent=wire.agent,
                memory=wire.memory,
                device=wire.device,
                tensors=tuple(_offered(each) for each in wire.tensors),
            )
        case v2.TensorHashed():
            return control.TensorHashed(offer=wire.offer, checksum=wire.checksum)
        case v2.TensorsTaken():
            return control.TensorsTaken(offer=wire.offer)
        case _:
            assert_never(wire)


def _destination(wire: v2.Destination) -> control.Destination:
    return control.Destination(
        name=wire.name,
        shape=wire.shape,
        dtype=wire.dtype,
        regions=tuple(
            Region(each.offset, each.run_bytes, each.runs, each.stride_bytes)
            for each in wire.regions
        ),
    )


def _offered(wire: v2.OfferedTensor) -> control.OfferedTensor:
    return control.OfferedTensor(
        name=wire.name,
        address=wire.address,
        size_bytes=wire.size_bytes,
        checksum=wire.checksum,
    )
