"""Build torch_magi: the planner (pybind11, no torch in it) and the operator library (torch's stable ABI).

CUDA sources are built where nvcc is found. TORCH_MAGI_CUDA_ARCHS names the architectures, such as "9.0a"
(the default); an empty value builds for the CPU only.
"""

import os
import platform
import shutil
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup
from torch.utils import cpp_extension
from torch.utils.cpp_extension import BuildExtension, CppExtension

INCLUDE = str(Path(__file__).resolve().parent / "csrc" / "include")
TORCH_TARGET = "0x020b000000000000"  # the stable ABI of torch 2.11

PLANNER_SOURCES = [
    "csrc/planner/bands.cpp",
    "csrc/planner/dispatch.cpp",
    "csrc/planner/module.cpp",
    "csrc/planner/tiles.cpp",
]
CPU_SOURCES = [
    "csrc/cpu/attention.cpp",
    "csrc/cpu/attention_avx2.cpp",
    "csrc/cpu/attention_avx512.cpp",
    "csrc/cpu/attention_generic.cpp",
    "csrc/cpu/merge_state.cpp",
    "csrc/cpu/range_ops.cpp",
]
CUDA_SOURCES = [
    "csrc/cuda/sm90/flex_attn_bwd_dkdv_d128.cu",
    "csrc/cuda/sm90/flex_attn_bwd_dkdv_d192.cu",
    "csrc/cuda/sm90/flex_attn_bwd_dkdv_d256.cu",
    "csrc/cuda/sm90/flex_attn_bwd_dkdv_d64.cu",
    "csrc/cuda/sm90/flex_attn_bwd_dq_d128.cu",
    "csrc/cuda/sm90/flex_attn_bwd_dq_d192.cu",
    "csrc/cuda/sm90/flex_attn_bwd_dq_d256.cu",
    "csrc/cuda/sm90/flex_attn_bwd_dq_d64.cu",
    "csrc/cuda/sm90/flex_attn_bwd_join.cu",
    "csrc/cuda/sm90/flex_attn_bwd_rows.cu",
    "csrc/cuda/sm90/flex_attn_fwd_combine.cu",
    "csrc/cuda/sm90/flex_attn_fwd_d128.cu",
    "csrc/cuda/sm90/flex_attn_fwd_d192.cu",
    "csrc/cuda/sm90/flex_attn_fwd_d256.cu",
    "csrc/cuda/sm90/flex_attn_fwd_d64.cu",
    "csrc/cuda/smxx/merge_state.cu",
    "csrc/cuda/smxx/range_ops.cu",
    "csrc/ops/flex_attn_bwd_cuda.cpp",
    "csrc/ops/flex_attn_fwd_cuda.cpp",
]
HEADERS = [
    "csrc/cpu/attention.h",
    "csrc/cpu/attention_tiles.h",
    "csrc/cuda/common/pack.cuh",
    "csrc/cuda/common/row_mask.cuh",
    "csrc/cuda/common/row_terms.cuh",
    "csrc/cuda/common/row_terms.h",
    "csrc/cuda/common/softcap.cuh",
    "csrc/cuda/common/softcap.h",
    "csrc/cuda/common/stream.h",
    "csrc/cuda/ptx/hopper.cuh",
    "csrc/cuda/ptx/layout.cuh",
    "csrc/cuda/ptx/wgmma.cuh",
    "csrc/cuda/sm90/flex_attn_bwd_dkdv.cuh",
    "csrc/cuda/sm90/flex_attn_bwd_dkdv.h",
    "csrc/cuda/sm90/flex_attn_bwd_dq.cuh",
    "csrc/cuda/sm90/flex_attn_bwd_dq.h",
    "csrc/cuda/sm90/flex_attn_bwd_rows.h",
    "csrc/cuda/sm90/flex_attn_fwd.cuh",
    "csrc/cuda/sm90/flex_attn_fwd.h",
    "csrc/cuda/sm90/plan_walk.cuh",
    "csrc/cuda/sm90/plan_walk.h",
    "csrc/include/checks.h",
    "csrc/include/merge_state.h",
    "csrc/include/range_ops.h",
    "csrc/include/tile_plan.h",
    "csrc/ops/sm90_host.h",
    "csrc/planner/planner.h",
]


def cuda_toolkit() -> tuple[str, str] | None:
    """Return the CUDA toolkit's folder and that of its static libraries, or None for a build without CUDA."""
    if os.environ.get("TORCH_MAGI_CUDA_ARCHS") == "":
        return None
    nvcc = shutil.which("nvcc")
    beside = str(Path(nvcc).resolve().parent.parent) if nvcc else None
    for home in (os.environ.get("CUDA_HOME"), beside, "/usr/local/cuda"):
        for folder in ("lib64", "lib", f"targets/{platform.machine()}-linux/lib"):
            if home and Path(home, "bin", "nvcc").exists() and Path(home, folder, "libcudart_static.a").exists():
                return home, str(Path(home, folder))
    return None


def operator_library() -> CppExtension:
    """Return the extension with the operators' kernels."""
    toolkit = cuda_toolkit()
    sources, flags = list(CPU_SOURCES), ["-O3", "-fvisibility=hidden", f"-DTORCH_TARGET_VERSION={TORCH_TARGET}"]
    # With --no-as-needed the weak CUDA symbols resolve where torch has CUDA, and stay null where it has not.
    link = ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu"]
    nvcc_flags, include, library = [], [], []
    if toolkit:
        home, static_libraries = toolkit
        archs = os.environ.get("TORCH_MAGI_CUDA_ARCHS", "9.0a").split(";")
        numbers = [a.replace(".", "") for a in archs]
        sources += CUDA_SOURCES
        flags += [f'-DTORCH_MAGI_CUDA_ARCHS="{";".join(archs)}"']
        nvcc_flags = ["-O3", "-std=c++17", f"-DTORCH_TARGET_VERSION={TORCH_TARGET}", "-DUSE_CUDA"]
        nvcc_flags += [f"-gencode=arch=compute_{n},code=sm_{n}" for n in numbers]
        include, library = [str(Path(home, "include"))], [static_libraries]
        link += ["-l:libcudart_static.a", "-ldl", "-lrt", "-lpthread"]
        if cpp_extension.CUDA_HOME is None:  # a torch without CUDA does not look for a toolkit
            cpp_extension.CUDA_HOME = home
            cpp_extension._check_cuda_version = lambda *args, **kwargs: None
    return CppExtension(
        "torch_magi._C",
        sources,
        py_limited_api=True,
        extra_compile_args={"cxx": flags, "nvcc": nvcc_flags},
        include_dirs=[*include, INCLUDE],
        library_dirs=library,
        extra_link_args=link,
        depends=HEADERS,
    )


class BuildWithHeaders(BuildExtension):
    """Compiles again what is older than a header: torch without CUDA asks nvcc for no dependencies."""

    def build_extensions(self):
        changed = max(Path(header).stat().st_mtime for header in HEADERS)
        for built in Path(self.build_temp).rglob("*.o"):
            if built.stat().st_mtime < changed:
                built.unlink()
        super().build_extensions()


setup(
    ext_modules=[
        Pybind11Extension(
            "torch_magi._planner",
            PLANNER_SOURCES,
            include_dirs=[INCLUDE],
            cxx_std=17,
            extra_compile_args=["-O2", "-fvisibility=hidden"],
            depends=HEADERS,
        ),
        operator_library(),
    ],
    cmdclass={"build_ext": BuildWithHeaders},
)
