"""Triton's interpreter at a third of its cost: what it does again and again with one outcome is done once."""

import dataclasses
import inspect

import numpy as np


def speed_up() -> None:
    """Before the first kernel. Parts that another release of Triton does not have are left as they are.

    Checks of integer overflow, which compiled kernels do not have, are off: they take most of the time.
    """
    from triton.language import core
    from triton.runtime import interpreter

    builder = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if dataclasses.is_dataclass(options) and hasattr(options, "sanitize_overflow"):
        builder.options = dataclasses.replace(options, sanitize_overflow=False)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    if hasattr(core, "_type_for_tuple_values"):
        core._type_for_tuple_values = _by_numbers(core._type_for_tuple_values)
    if all(hasattr(interpreter, name) for name in ("_patch_builtin", "_patch_attr", "_patch_lang")):
        interpreter._patch_builtin = _patched_by_name(interpreter._patch_attr)
        interpreter._patch_lang = _patched_once_a_launch(interpreter._patch_lang)
    if all(hasattr(getattr(interpreter, "ReduceOps", None), name) for name in ("generic_reduce", "to_tensor")):
        interpreter.ReduceOps.generic_reduce = _reduced_in_halves(interpreter.ReduceOps.generic_reduce)


def _by_name(numpy_dtype):
    """The dtype of a Triton type, which is looked up in a dictionary made for the purpose."""
    found = {}

    def dtype_of(kind):
        name = str(kind)
        if name not in found:
            found[name] = numpy_dtype(kind)
        return found[name]

    return dtype_of


def _by_numbers(type_for_values):
    """The type of a tuple of numbers, such as the shape of a tensor, whose name takes long to write."""
    found = {}

    def type_of(values, fields=None):
        if fields is not None or any(type(x) is not int for x in values):
            return type_for_values(values, fields)
        key = tuple(values)
        if key not in found:
            found[key] = type_for_values(values)
        return found[key]

    return type_of


def _patched_by_name(patch_attr):
    """Looks for a module's builtins, which are some of hundreds of members, only the first time."""
    from triton.language.core import is_builtin

    names = {}

    def patch_builtin(module, builder, scope):
        if module not in names:
            names[module] = [name for name, member in inspect.getmembers(module) if is_builtin(member)]
        for name in names[module]:
            member = getattr(module, name)
            if is_builtin(member):
                patch_attr(module, name, member, builder, scope)

    return patch_builtin


def _patched_once_a_launch(patch_lang):
    """A kernel's calls of other functions find the language patched already, where these see the same modules."""
    patched = set()

    def patch(fn):
        if id(fn.__globals__) in patched:
            return None
        scope = patch_lang(fn)
        if not hasattr(scope, "restore"):
            return scope
        patched.add(id(fn.__globals__))
        restore = scope.restore

        def restore_all():
            patched.clear()
            restore()

        scope.restore = restore_all
        return scope

    return patch


def _reduced_in_halves(one_by_one):
    """Neighbours along an axis are combined all at once, as often as that halves the axis, not element by element."""

    def reduce(self, input):
        shape, axis = input[0].handle.data.shape, self.axis
        if axis is None or self.keep_dims or shape[axis] & (shape[axis] - 1):
            return one_by_one(self, input)
        arrays, dtypes = [np.moveaxis(x.handle.data, axis, 0) for x in input], [x.dtype for x in input]
        while len(arrays[0]) > 1:
            halves = [
                self.to_tensor(np.ascontiguousarray(a[first::2]), dtype)
                for first in (0, 1)
                for a, dtype in zip(arrays, dtypes, strict=True)
            ]
            found = self.combine_fn.fn(*halves)
            arrays = [x.handle.data for x in (found if isinstance(found, tuple) else (found,))]
        return [self.to_tensor(a[0], dtype) for a, dtype in zip(arrays, dtypes, strict=True)]

    return reduce
