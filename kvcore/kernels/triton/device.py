"""The twins on a vendor's device, through torch: its allocator, its streams, and the Triton that came with it.

Ops report to the status words of the stream that the backend's runtime knows, as its native ops do, and keep what they
use in the same way.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from kvcore.errors import BackendLoadError, DeviceError, KVCoreError, OutOfMemoryError
from kvcore.kernels.device_objects import VendorStream
from kvcore.kernels.library import Library
from kvcore.kernels.triton.queue import Owner, Queue, aligned
from kvcore.kernels.vendor import VendorLibrary, check_place

__all__ = ["TorchOwner", "TorchQueue"]

_KEPT = 64


class TorchOwner(Owner):
    """A vendor's devices, of which torch has the same view.

    Parameters
    ----------
    library : VendorLibrary
        Resolves streams.

    Raises
    ------
    BackendLoadError
        torch shows no device of these.
    """

    def __init__(self, library: VendorLibrary) -> None:
        self.library = library
        try:
            torch.cuda.init()  # now: ops that name no stream are on torch's from the first one on, whichever they are
        except (AssertionError, RuntimeError) as error:  # the former: this torch was built for no such device
            raise BackendLoadError(f"torch {torch.__version__} shows no device: {error}") from error
        self.tables: OrderedDict[tuple[int, int], tuple[object, list[Any]]] = OrderedDict()
        self.lock = threading.Lock()

    def open(self, op: str, stream: Any) -> TorchQueue:
        """Begin an op on a stream of the library's or of torch's; None is the current one.

        Raises
        ------
        ConfigError
            It is none of these.
        """
        return TorchQueue(self, op, self.library.resolve(stream))


class TorchQueue(Queue):
    """An op on a device. Its kernels are launched when it is closed, by when its stream keeps what they use."""

    def __init__(self, owner: TorchOwner, op: str, stream: VendorStream) -> None:
        self._owner, self._op, self._stream = owner, op, stream
        self.status = stream.status
        self.tiles = 4 * owner.library.info(stream.ordinal).warp_width // 32
        self._device = torch.device("cuda", stream.ordinal)  # torch's name for AMD's devices too
        self._native = _torch_stream(stream.native, self._device)
        self._memory: list[Any] = []
        self._launches: list[Callable[[], Any]] = []

    def launch(self, kernel: Any, programs: int, *args: int, warps: int = 4, **constants: Any) -> None:
        """Note a launch."""
        if programs:
            options = {"num_warps": warps, "enable_fp_fusion": False}
            self._launches.append(lambda: kernel[(programs,)](*args, **options, **constants))

    def upload(self, *tables: npt.NDArray[Any]) -> tuple[int, ...]:
        """Return where tables will be on the device when the kernels run."""
        joined, starts = aligned(tables)
        with self._place():
            copied = torch.from_numpy(joined).to(self._device, non_blocking=True)
        self._memory.append(copied)
        return tuple(copied.data_ptr() + start for start in starts)

    def resident(self, key: object, make: Callable[[], tuple[npt.NDArray[Any], ...]]) -> tuple[int, ...]:
        """Return where tables are on the device."""
        mine = self._stream.ordinal, id(key)
        with self._owner.lock:
            found = self._owner.tables.get(mine)
            if found is None:
                with self._place():
                    copies = [torch.from_numpy(np.array(table)).to(self._device) for table in make()]
                    self._native.synchronize()  # other streams will read them
                found = self._owner.tables[mine] = key, copies
                while len(self._owner.tables) > _KEPT:
                    self._owner.tables.popitem(last=False)
        self._memory += found[1]
        return tuple(copy.data_ptr() for copy in found[1])

    def scratch(self, nbytes: int) -> int:
        """Return memory of torch's allocator, which gives it to nobody before this stream has passed."""
        with self._place():
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._memory.append(memory)
        return int(memory.data_ptr())

    def close(self, op: str, keep: Any, subject: Any = None) -> None:
        """Launch the kernels.

        Raises
        ------
        LayoutError
            An array is memory of the host or of another device.
        DeviceError
            Triton or the driver refuses.
        """
        check_place(op, keep, self._owner.library.name(self._stream.ordinal))
        self._stream.queue(cast(Library, _Launches(self)), op, b"", (keep, self._memory))

    def run(self) -> None:
        """Launch what was noted."""
        with self._place():
            for launch in self._launches:
                launch()

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        """Make the op's device and stream those of torch, where Triton looks for them, and translate errors."""
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._native):
                yield
        except KVCoreError:
            raise
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(f"{self._op}: torch has no memory for scratch: {error}") from error
        except Exception as error:  # Triton's compiler, its launcher and torch: whatever they raise is the reason
            raise DeviceError(f"{self._op} was not launched by Triton: {type(error).__name__}: {error}") from error


def _torch_stream(native: int, device: torch.device) -> torch.cuda.Stream:
    """Return a stream as torch has it. Of the null stream `ExternalStream` makes a new one, which waits for nobody."""
    return torch.cuda.ExternalStream(native, device=device) if native else torch.cuda.default_stream(device)


class _Launches:
    """The kernels of one op, in the place of the library that `DeviceStream.queue` launches with."""

    def __init__(self, queue: TorchQueue) -> None:
        self._queue = queue

    def launch(self, op: str, args: bytes, stream: int | None, status: int) -> None:
        self._queue.run()
