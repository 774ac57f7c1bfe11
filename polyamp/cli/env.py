"""`polyamp env`: a block to paste into a bug report.

Rules
- Versions come from the metadata of installed distributions: no framework is imported, so a broken one can be reported too.
- Only the environment variables of a fixed list are read: those that change numerics, devices or threads. None holds a secret or a user's name.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click

from polyamp import __version__

__all__ = ["describe", "env"]

PACKAGES = (
    *("torch", "jax", "jaxlib", "keras", "tensorflow", "tensorflow-cpu", "flax", "optax", "equinox", "jmp"),
    *("numpy", "ml_dtypes", "pluggy", "lightning", "accelerate"),
)
VARIABLES = (
    *("XLA_FLAGS", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE", "TF_XLA_FLAGS", "TF_ENABLE_ONEDNN_OPTS"),
    *("JAX_PLATFORMS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_NUMPY_DTYPE_PROMOTION", "JAX_DISABLE_JIT"),
    *("KERAS_BACKEND", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG"),
    *("PYTORCH_CUDA_ALLOC_CONF", "TORCHINDUCTOR_EMULATE_PRECISION_CASTS", "TORCHDYNAMO_DISABLE", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"),
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_CORETYPE"),
    *("POLYAMP_DEBUG",),
)
# Instruction sets in which 16-bit results may be rounded, contracted or flushed differently.
_FEATURES = (
    *("fma", "f16c", "avx", "avx2", "avx512f", "avx512_bf16", "avx512_fp16", "avx_ne_convert", "amx_bf16", "amx_fp16", "amx_tile"),
    *("fphp", "asimdhp", "bf16", "sve", "svebf16", "sme"),
)
_CPUINFO = Path("/proc/cpuinfo")
_PROBE_SECONDS = 10


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object instead of text.")
def env(as_json: bool) -> None:
    """Describe this machine and its packages, for a bug report."""
    document = describe()
    if as_json:
        from polyamp.cli.output import print_json

        print_json(document)
        return
    for title, values in document.items():
        click.echo(f"[{title}]")
        for name, value in values.items():
            click.echo(f"{name}: {value or 'not installed'}")
        if not values:
            click.echo("none set")


def describe() -> dict[str, dict[str, str | None]]:
    """Sections of the report: `polyamp` and `machine`, then `packages` (None: not installed) and `environment` (set variables only)."""
    return {
        "polyamp": {
            "polyamp": __version__,
            "python": f"{platform.python_implementation()} {platform.python_version()}",
        },
        "machine": {
            "os": platform.platform(),
            "cpu": _cpu_model(),
            "cpu features": " ".join(_cpu_features()) or "unknown",
            "cpu count": str(os.cpu_count()),
            "gpu": _gpus(),
        },
        "packages": {name: _version(name) for name in PACKAGES},
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpuinfo(key: str) -> str:
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = (line.partition(":")[2].strip() for line in text.splitlines() if line.partition(":")[0].strip() == key)
    return next(found, "")


def _cpu_model() -> str:
    return _cpuinfo("model name") or _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor() or platform.machine()


def _cpu_features() -> list[str]:
    present = set((_cpuinfo("flags") or _cpuinfo("Features")).split())
    return [name for name in _FEATURES if name in present]


def _gpus() -> str:
    lines = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    return "; ".join(lines) or "no NVIDIA driver found"


def _output(program: str, *arguments: str) -> str:
    found = shutil.which(program)
    if found is None:
        return ""
    try:
        done = subprocess.run([found, *arguments], capture_output=True, text=True, timeout=_PROBE_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
