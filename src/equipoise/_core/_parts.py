# SPDX-License-Identifier: Apache-2.0
"""Kernels as parts of other kernels: typed and lowered once, optimised where they end up.

Numba compiles every function that another one calls to machine code of its own, and then again inside each of its
callers, up to the one that Python calls. Where calls are many levels deep, that is most of the time of compiling, spent
on code that never runs. Here a kernel that another one calls is translated to LLVM's intermediate code and no further.
Only the kernel that Python calls is optimised, with all its parts, as a C compiler treats one file.

A kernel that Python calls and that is a part of others too has an ordinary version besides.
"""

from typing import Any

from numba.core import types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.typing.templates import make_concrete_template


class _PartLibrary(JITCodeLibrary):
    """Code that waits to be linked into a caller's."""

    def finalize(self) -> None:
        """Links what the part calls, and leaves the rest to whoever calls the part."""
        self._raise_if_finalized()
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True


class _PartCompiler(Compiler):
    """Numba's own compiler, up to the point where it would optimise."""

    def compile_extra(self, func: Any) -> Any:
        flags = self.state.flags
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
        self.state.library = _PartLibrary(self.state.targetctx.codegen(), func.__qualname__)
        return super().compile_extra(func)


class _Part:
    """What Numba asks of a function that another one calls; argument types stand for a version of it."""

    def __init__(self, dispatcher: Any) -> None:
        self._name = dispatcher.py_func.__name__
        self._target = dispatcher.targetctx
        self._versions: dict[tuple[Any, ...], Any] = {}
        own = dispatcher._compiler
        self._compiler = type(own)(own.py_func, own.targetdescr, own.targetoptions, own.locals, _PartCompiler)

    def get_call_template(self, args: Any, kws: Any) -> tuple[Any, Any, Any, Any]:
        pysig, args = self._compiler.fold_argument_types(args, kws)
        key = tuple(types.unliteral(kind) for kind in args)  # one version for 1 and for any other number
        if key not in self._versions:
            version = self._compiler.compile(key, None)
            self._versions[key] = version
            self._target.insert_user_function((self, key), version.fndesc, [version.library])
        template = make_concrete_template(self._name, self._name, [self._versions[key].signature])
        return template, pysig, args, {}

    def get_overload(self, sig: Any) -> Any:
        return self, tuple(sig)


def make_part(dispatcher: Any) -> None:
    """Has callers of a compiled function include it as a part."""
    part = _Part(dispatcher)
    dispatcher.get_call_template = part.get_call_template
    dispatcher.get_overload = part.get_overload
