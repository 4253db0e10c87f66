# SPDX-License-Identifier: Apache-2.0
"""`equipoise warmup`."""


def warmup() -> None:
    """Compile all kernels now, so that no later process on a CPU of this kind waits for it.

    For images and continuous integration. Takes about a minute of one core, and a few seconds when it was done before.
    Kernels are kept beside the package, or in the folder that `NUMBA_CACHE_DIR` names.
    """
    import time

    from rich.console import Console

    import equipoise

    console, start = Console(), time.perf_counter()

    def show(title: str) -> None:
        console.print(f"{time.perf_counter() - start:5.0f} s  {title}", highlight=False)

    equipoise.warmup(progress=show)
    show("done")
