# SPDX-License-Identifier: Apache-2.0
"""`equipoise warmup`."""


def warmup() -> None:
    """Compile all kernels now, so that later processes on a CPU of this kind start without compiling.

    Useful in container images and continuous integration. Takes about a minute on one core, and a few seconds if the
    kernels are compiled already. Kernels are stored beside the package, or in the folder that `NUMBA_CACHE_DIR` names.
    """
    import time

    from rich.console import Console

    import equipoise

    console, start = Console(), time.perf_counter()

    def show(title: str) -> None:
        console.print(f"{time.perf_counter() - start:5.0f} s  {title}", highlight=False)

    equipoise.warmup(progress=show)
    show("done")
