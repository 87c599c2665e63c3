"""`python -m rollsync.shell.cli`, the same as `rollsync`."""

import sys

from rollsync.shell.cli.main import main

sys.exit(main())
