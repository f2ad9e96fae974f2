# SPDX-License-Identifier: Apache-2.0
class Module:
    def __init__(self):
        self._modules = {}
        self._parameters = {}
        self._network_outputs = {}

    def forward(self, *args, **kwargs):
        raise NotImplementedError

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)

    def __getattr__(self, name):
        for held in ("_parameters", "_modules"):
            if name in self.__dict__.get(held, ()):
                return self.__dict__[held][name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name, value):
        from .parameter import Parameter

        if isinstance(value, Parameter):
            self._parameters[name] = value
        elif isinstance(value, Module):
            self._modules[name] = value
        else:
            super().__setattr__(name, value)

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        yield prefix, self
        for name, module in self._modules.items():
            yield from module.named_modules(prefix=f"{prefix}.{name}" if prefix else name)

    def named_parameters(self, prefix="", recurse=True):
        for path, module in self.named_modules(prefix=prefix):
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    yield (f"{path}.{name}" if path else name), parameter

    def parameters(self, recurse=True):
        return (parameter for _, parameter in self.named_parameters())

    def register_parameter(self, name, param):
        self._parameters[name] = param

    def register_network_output(self, name, value):
        self._network_outputs[name] = value

    def named_network_outputs(self):
        for path, module in self.named_modules():
            for name, output in module._network_outputs.items():
                yield (f"{path}.{name}" if path else name), output


class ModuleList(Module):
    def __init__(self, modules):
        super().__init__()
        for index, module in enumerate(modules):
            self._modules[str(index)] = module

    def __getitem__(self, idx):
        return self._modules[str(idx)]

    def __len__(self):
        return len(self._modules)
