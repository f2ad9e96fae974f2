# SPDX-License-Identifier: Apache-2.0
"""All-gathers of other packages, for `Communicator.all_gather`. Each module imports its package when it is used."""
