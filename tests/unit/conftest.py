"""Lets the unit tests import the helper modules beside them (import mode importlib does not)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
