# SPDX-License-Identifier: Apache-2.0
"""Source for scripts that ask a process's plugin registry what it has and what it complained about."""

# Needs `tensorrt`; leaves `registry` and `recorder`, whose `errors` are texts.
RECORD = """
class Recorder(tensorrt.IErrorRecorder):
    def __init__(self):
        super().__init__()
        self.errors = []
    def report_error(self, code, text):
        self.errors.append(text)
        return False
    def num_errors(self):
        return len(self.errors)
    def get_error_code(self, index):
        return tensorrt.ErrorCodeTRT.UNSPECIFIED_ERROR
    def get_error_desc(self, index):
        return self.errors[index]
    def has_overflowed(self):
        return False
    def clear(self):
        self.errors.clear()
registry = tensorrt.get_plugin_registry()
recorder = Recorder()
registry.error_recorder = recorder
"""
