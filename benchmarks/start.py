"""How busy the machine was when this process began; each case imports it before all else.

Importing torch keeps a core busy for seconds. A load average that is taken after it has them in it.
"""

from __future__ import annotations

import os

LOAD = os.getloadavg()[0]
"""Average of the minute before."""
