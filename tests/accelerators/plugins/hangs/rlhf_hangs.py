"""A plugin that waits for its driver as it is imported, and holds the locks of what it is importing."""

import time

time.sleep(600)
