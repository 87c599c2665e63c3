#!/bin/sh
# Prints the Python to make the environment with, or says on stderr what is missing.
# PYTHON, when set, is the only candidate; otherwise 3.11 is preferred, because the locked
# versions are tested with it.
set -eu
for candidate in ${PYTHON:-python3.11 python3 python3.12 python3.13}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            echo "$candidate"
            exit 0
        fi
        no_venv=$candidate
    fi
done
if [ -n "${no_venv:-}" ]; then
    echo "rollsync: $no_venv has no venv module; on Debian and Ubuntu: apt install python3.11-venv" >&2
else
    echo "rollsync: Python 3.11 or newer is needed (looked for: ${PYTHON:-python3.11 python3})." >&2
    echo "  Install it, or say where it is: make PYTHON=/path/to/python3.11 ..." >&2
fi
exit 1
