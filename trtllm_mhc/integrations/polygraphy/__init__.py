# SPDX-License-Identifier: Apache-2.0
"""Polygraphy: scripts for its command line, and runners for its Python interface.

The scripts are functions in the file `SCRIPTS`, to be named on Polygraphy's command line. The runners are in `runners`,
which needs Polygraphy; the scripts need it only in so far as it is what runs them.
"""

from pathlib import Path

#: The file of the command line's scripts. It has a folder to itself because Polygraphy puts that folder first on
#: `sys.path` and imports the file by its bare name.
SCRIPTS = Path(__file__).parent / "scripts" / "mhc.py"
