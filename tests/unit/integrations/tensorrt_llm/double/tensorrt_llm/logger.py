# SPDX-License-Identifier: Apache-2.0
class Logger:
    def info(self, *msg):
        print("[info]", *msg)

    def warning(self, *msg):
        print("[warning]", *msg)


logger = Logger()
