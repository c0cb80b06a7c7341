"""The compiled CPU kernels: finding the library, its structures, and torch's own OpenMP threads for it.

The library is built from csrc/ when subquad is installed where a C++ compiler is. It has no torch headers, so one build
serves every torch version; structures are mirrored here field by field and their sizes compared when it is loaded.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "DTYPES",
    "FUNCTIONS",
    "SEGMENT",
    "CallStruct",
    "Map",
    "StridedTensor",
    "check_status",
    "load",
    "missing",
    "refusal",
]

ABI = 10
# Tokens per state that the causal forward stores for its backward.
SEGMENT = 192
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# "none": nothing is far, and the library looks at no function.
FUNCTIONS = {"exp": 0, "relu": 1, "elu": 2, "identity": 3, "taylor": 4, "none": 3}

_pointer, _long, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class StridedTensor(ctypes.Structure):
    """(batch, head, token, component) with free strides, in elements."""

    _fields_ = [("data", _pointer), ("stride", _long * 4), ("dtype", _int), ("unused", _int)]


class Map(ctypes.Structure):
    """One side's map, queries or keys; every *_head stride is 0 where the heads share the array."""

    _fields_ = [
        (name, kind)
        for array in ("weight", "bias", "tilt", "signs", "norms")
        for name, kind in ((array, _pointer), (f"{array}_head", _long))
    ] + [("square", _float), ("unused", _float)]


class CallStruct(ctypes.Structure):
    """Everything one call is about; csrc/call.h says what each field means."""

    _fields_ = [
        *((name, _long) for name in "batch heads_q heads_kv length_q length_k dim width features rows".split()),
        *((name, _long) for name in ("key_shift", "keys_stored")),
        *((name, _int) for name in "function projection antithetic causal blocks normalise threads accumulate".split()),
        ("epsilon", _float),
        *((name, _int) for name in ("differentiable", "non_temporal", "near")),
        *((name, StridedTensor) for name in ("q", "k", "v", "out")),
        *((name, Map) for name in ("map_q", "map_k")),
        ("key_mask", _pointer),
        ("mask_batch", _long),
        ("mask_token", _long),
        *((name, _pointer) for name in "s_in z_in c_in s_out z_out c_out checkpoints".split()),
        *((name, StridedTensor) for name in ("dout", "dq", "dk", "dv")),
        *((name, _pointer) for name in "ds_out dz_out ds_in dz_in".split()),
        *((name, StridedTensor) for name in "near_q near_k sink_k sink_v near_dq near_dk sink_dk sink_dv".split()),
        ("near_mask", _pointer),
        ("near_batch", _long),
        ("near_token", _long),
        *((name, _pointer) for name in "sink_place gain gain_grad stats".split()),
        *((name, _long) for name in "near_dim sinks window past".split()),
        ("scale", _float),
        ("both_sides", _int),
        *((name, StridedTensor) for name in ("token_k", "token_v")),
        *((name, _pointer) for name in "count token_mask count_out".split()),
        *((name, _pointer) for name in "window_k_out window_v_out sink_k_out sink_v_out".split()),
    ]


def _candidates() -> list[Path]:
    named = os.environ.get("SUBQUAD_NATIVE_LIBRARY")
    if named:
        return [Path(named)]
    folder = Path(__file__).parent
    return [folder / f"libsubquad_native{suffix}" for suffix in (".so", ".dylib", ".dll")]


def _find() -> tuple[Any, str]:
    """The library and "", or None and the reason why there is none."""
    path = next((p for p in _candidates() if p.is_file()), None)
    if path is None:
        named = os.environ.get("SUBQUAD_NATIVE_LIBRARY")
        if named:
            return None, f"SUBQUAD_NATIVE_LIBRARY={named!r} is not a file"
        return None, "this installation was built without a C++ compiler; install one and reinstall subquad from source"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"{path} cannot be loaded: {error}"
    another = f"{path} was built for another version of subquad; reinstall subquad from source"
    library.subquad_abi.restype = _long
    if library.subquad_abi() != ABI:
        return None, another
    library.subquad_call_size.restype = library.subquad_segment.restype = _long
    if library.subquad_call_size() != ctypes.sizeof(CallStruct) or library.subquad_segment() != SEGMENT:
        return None, another
    library.subquad_isa.restype = library.subquad_error.restype = ctypes.c_char_p
    for name in ("forward", "backward", "step"):
        getattr(library, f"subquad_{name}").argtypes = [ctypes.POINTER(CallStruct)]
    library.subquad_project.argtypes = [ctypes.POINTER(CallStruct), _pointer]
    library.subquad_use_gomp.argtypes = [_pointer]
    library.subquad_use_gomp.restype = None
    library.subquad_use_gomp(_torch_gomp())
    if not library.subquad_isa():
        return None, library.subquad_error().decode()
    return library, ""


def _torch_gomp() -> int | None:
    """The address of GOMP_parallel in the OpenMP runtime that torch runs on; None: threads are then started per call.

    Only a runtime that is in the process already counts (RTLD_NOLOAD): a second one would fight for the cores.
    """
    if not sys.platform.startswith("linux"):
        return None
    shipped = sorted(Path(torch.__file__).parent.glob("lib/libgomp*")) + sorted(
        Path(torch.__file__).parent.parent.glob("torch.libs/libgomp*")
    )
    for name in [*map(str, shipped), "libgomp.so.1"]:
        try:
            runtime = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            continue
        return ctypes.cast(runtime.GOMP_parallel, _pointer).value
    return None


# What `_find` found, once it was asked. A plain dictionary, because torch.compile looks through functools caches.
_found: dict[str, Any] = {}


def missing() -> str:
    """Why there are no native kernels here, or "" if there are."""
    if not _found:
        library, reason = _find()
        _found.update(library=library, reason=reason)
    return str(_found["reason"])


def load() -> Any:
    """The library; RuntimeError with the reason where there is none."""
    reason = missing()
    if reason:
        raise RuntimeError(f"backend='native' is not available: {reason}")
    return _found["library"]


def check_status(status: int) -> None:
    """Raise what a call of the library reports."""
    if status:
        raise MemoryError("the native kernels could not allocate their working memory")


def refusal(tensors: tuple[Tensor, ...]) -> str:
    """Why the library cannot take these tensors, or ""."""
    if reason := missing():
        return reason
    for x in tensors:
        if x.device.type != "cpu":
            return f"they run on the CPU, got a tensor on {x.device}"
        if x.dtype not in DTYPES:
            return f"they take float32, bfloat16 and float16, got {x.dtype}"
    return ""
