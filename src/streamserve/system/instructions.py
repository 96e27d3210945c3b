"""The newest instructions that this process may use: the variable STREAMSERVE_KERNEL_PATH bounds them.

A bounded process behaves as on a processor without later instructions: its kernels are compiled for the
lesser processor, or taken from the package for it, and PyTorch's kernels are limited to match. A server's
workers inherit the bound; each machine of a cluster has a separate one. The bound is no setting of a model:
`--kernel-path` chooses a model's path among the paths within the bound.
"""

import os
from collections.abc import Mapping
from typing import cast, get_args

from streamserve.protocol.config import KernelPath
from streamserve.protocol.errors import CheckpointError

KERNEL_PATH_VARIABLE = "STREAMSERVE_KERNEL_PATH"

_PYTORCH: dict[str, tuple[str, str, str]] = {
    "portable": ("default", "SSE41", "SSE4_2"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512"),
    "avx512_bf16": ("avx512", "AVX512_CORE_BF16", "AVX512"),
}
"""By bound: the limits for PyTorch, oneDNN and MKL, in the order of `_PYTORCH_VARIABLES`."""
_PYTORCH_VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


def kernel_bound(environ: Mapping[str, str] | None = None) -> KernelPath:
    """Return the newest instructions that may be detected; "auto" without a bound. Raises CheckpointError for
    an unknown value."""
    text = (os.environ if environ is None else environ).get(KERNEL_PATH_VARIABLE) or "auto"
    names = get_args(KernelPath)
    if text not in names:
        raise CheckpointError(f"{KERNEL_PATH_VARIABLE} = {text!r}: must be one of {', '.join(names)}")
    return cast(KernelPath, text)


def pytorch_bounds(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables that bound PyTorch's instructions likewise; none without a bound.
    PyTorch reads them when it first computes."""
    limits = _PYTORCH.get(kernel_bound(environ), ())
    return dict(zip(_PYTORCH_VARIABLES, limits, strict=False))
