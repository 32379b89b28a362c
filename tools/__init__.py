"""Programs. Installed they are rlhfuse.tools, and find their parts, which lie beside them, all the same."""

import os
import sys

sys.path.append(os.path.dirname(__file__))  # where python itself looks when it is given a program by its file
