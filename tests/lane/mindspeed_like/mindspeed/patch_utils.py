"""Patches with records: stacked wrappers over a replacement or the original, taken off and put on as a whole."""

import importlib
import sys
import types
from importlib.machinery import ModuleSpec


class Patch:
    def __init__(self, target, function, create_dummy):
        self.orig_module_name, _, self.orig_func_name = target.rpartition(".")
        self.orig_module = self.orig_func = self.patch_func = self.final_patch_func = None
        self.wrappers = []
        self.is_applied = False
        self.create_dummy = create_dummy
        self.set_patch_func(function)

    def set_patch_func(self, function, force_patch=False):
        """What a function does is told by its name."""
        if getattr(function, "__name__", "").endswith(("wrapper", "decorator")):
            if function not in self.wrappers:
                self.wrappers.append(function)
        elif self.patch_func and not force_patch:
            raise RuntimeError(f"the patch of {self.orig_func_name} exist !")
        else:
            self.patch_func = function
        self.is_applied = False

    def remove_patch(self):
        if self.orig_func is not None:
            self._rebind(self.final_patch_func, self.orig_func, lambda module: "mindspeed" not in module)
        self.patch_func = self.final_patch_func = None
        self.is_applied = False

    def apply_patch(self):
        if self.is_applied:
            return
        module, current = self._find()
        if self.orig_module is None:
            self.orig_module, self.orig_func = module, current
        final = self.patch_func or self.orig_func
        for wrapper in self.wrappers:
            final = wrapper(final)
        setattr(self.orig_module, self.orig_func_name, final)
        self._rebind(current, final, lambda module: True)
        self.is_applied, self.final_patch_func = True, final

    def _rebind(self, before, after, is_searched):
        """In every loaded module, under the function's own name alone."""
        for name, module in sys.modules.copy().items():
            if is_searched(name) and vars(module).get(self.orig_func_name, self) is before:
                setattr(module, self.orig_func_name, after)

    def _find(self):
        try:
            owner = importlib.import_module(self.orig_module_name)
        except ModuleNotFoundError:
            parent, _, name = self.orig_module_name.rpartition(".")
            found = importlib.import_module(parent) if parent in sys.modules or not self.create_dummy else None
            if hasattr(found, name):  # a class
                owner = getattr(found, name)
            elif self.create_dummy:
                owner = types.ModuleType(self.orig_module_name)
                owner.__file__ = "mindspeed.dummy_module.py"
                owner.__spec__ = ModuleSpec(self.orig_module_name, None)
                sys.modules[self.orig_module_name] = owner
            else:
                raise
        return owner, getattr(owner, self.orig_func_name, None)


class MindSpeedPatchesManager:
    patches_info = {}

    @staticmethod
    def register_patch(target, function=None, force_patch=False, create_dummy=False):
        known = MindSpeedPatchesManager.patches_info
        if target in known:
            known[target].set_patch_func(function, force_patch)
        else:
            known[target] = Patch(target, function, create_dummy)

    @staticmethod
    def remove_patches():
        for patch in MindSpeedPatchesManager.patches_info.values():
            patch.remove_patch()
            patch.wrappers.clear()

    @staticmethod
    def apply_patches():
        for patch in MindSpeedPatchesManager.patches_info.values():
            patch.apply_patch()
