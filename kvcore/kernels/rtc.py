"""NVRTC and hipRTC: a compiler in a shared library, called through the functions that both have."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from kvcore.errors import BackendLoadError

__all__ = ["STANDARD_HEADERS", "RuntimeCompiler"]

_LOG_LINES = 20

STANDARD_HEADERS = {
    "stdint.h": """
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef unsigned long uintptr_t;
#define UINT32_MAX 0xFFFFFFFFu
#define UINT64_MAX 0xFFFFFFFFFFFFFFFFul
#define INT32_MAX 0x7FFFFFFF
#define INT64_MAX 0x7FFFFFFFFFFFFFFFl
""",
    "stddef.h": "typedef decltype(sizeof 0) size_t;",
    "type_traits": """
namespace std {
template <class A, class B> inline constexpr bool is_same_v = false;
template <class A> inline constexpr bool is_same_v<A, A> = true;
}
""",
}
"""What kernels use of the standard library, for run-time compilers, which bring no headers (64-bit Linux)."""


class RuntimeCompiler:
    """A run-time compiler; its library is loaded here and by nothing else.

    Parameters
    ----------
    library : str
        A path, or a name that the loader finds.
    prefix : {"nvrtc", "hiprtc"}
        What its functions begin with.

    Attributes
    ----------
    version : tuple of int
        Major and minor.

    Raises
    ------
    BackendLoadError
        The library does not load, or is no such compiler.
    """

    def __init__(self, library: str, prefix: Literal["nvrtc", "hiprtc"]) -> None:
        self.library = library
        self._prefix = prefix
        try:
            self._dll = ctypes.CDLL(library)
            self._error_string = self._dll[f"{prefix}GetErrorString"]
            self._error_string.restype, self._error_string.argtypes = ctypes.c_char_p, (ctypes.c_int,)
            major, minor = ctypes.c_int(), ctypes.c_int()
            self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        except (OSError, AttributeError) as error:
            raise BackendLoadError(f"{library} is no {prefix} that can be used: {error}") from error
        self.version = (major.value, minor.value)

    def compile(
        self, source: str, options: Sequence[str], headers: Mapping[str, str] | None = None, name: str = "kvcore.cu"
    ) -> bytes:
        """Compile a source to what the vendor's driver loads as a module.

        Parameters
        ----------
        source : str
        options : sequence of str
            The architecture among them. NVRTC gives machine code for a real one (``sm_90``), PTX for a virtual one.
        headers : mapping, optional
            Text of headers, by the name that they are included by.
        name : str
            What errors call the source.

        Raises
        ------
        BackendLoadError
            The compiler refused: the message has the options and the first lines of its log.
        """
        texts = {key.encode(): text.encode() for key, text in (headers or {}).items()}
        program = ctypes.c_void_p()
        self._call(
            "CreateProgram",
            *(ctypes.byref(program), source.encode(), name.encode(), len(texts)),
            *(_strings(list(texts.values())), _strings(list(texts))),
        )
        try:
            arguments = _strings([option.encode() for option in options])
            status = self._dll[f"{self._prefix}CompileProgram"](program, len(options), arguments)
            if status != 0:
                log = self._output(program, "ProgramLog").rstrip(b"\0").decode("utf-8", "replace")
                first = "\n".join(log.splitlines()[:_LOG_LINES])
                raise BackendLoadError(
                    f"{self.library} {self.version[0]}.{self.version[1]} did not compile {name} with "
                    f"{' '.join(options)}: {self._why(status)}\n{first}"
                )
            if self._prefix == "hiprtc":
                return self._output(program, "Code")
            return self._output(program, "CUBIN") or self._output(program, "PTX")
        finally:
            self._call("DestroyProgram", ctypes.byref(program))

    def _output(self, program: ctypes.c_void_p, what: str) -> bytes:
        """Return one of a program's texts; empty where it has none."""
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        if size.value:
            self._call(f"Get{what}", program, text)
        return text.raw

    def _call(self, function: str, *arguments: Any) -> None:
        status = self._dll[f"{self._prefix}{function}"](*arguments)
        if status != 0:
            raise BackendLoadError(f"{self.library}: {self._prefix}{function} failed: {self._why(status)}")

    def _why(self, status: int) -> str:
        text: bytes | None = self._error_string(status)
        return text.decode("utf-8", "replace") if text else f"error {status}"


def _strings(texts: list[bytes]) -> Any:
    """Return an array of C strings."""
    return (ctypes.c_char_p * len(texts))(*texts)
